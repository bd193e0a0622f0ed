"""The examples, and the blocks of docs/examples that show what each prints. These are the only place where it stands."""

import dataclasses
import subprocess
from pathlib import Path

from tests.docs import blocks
from tests.docs.blocks import Job
from tests.support import ROOT

PAGES = sorted((ROOT / "docs" / "examples").glob("*.md"))
CONSOLES = [console for page in PAGES for console in blocks.consoles(page)]
# Parts of examples, like rpc_pipeline/resnet.py, have no command on their first line.
PROGRAMS = sorted(path for path in (ROOT / "examples").rglob("*.py") if path.read_text().startswith("# python "))


def first_line(path: Path) -> str:
    """The command that runs an example."""
    return path.read_text().splitlines()[0].removeprefix("# ")


def shown(path: Path) -> Job:
    """The command on the first line of an example, and its output, as a page shows them."""
    found = [job for console in CONSOLES for job in console if job.command == f"$ {first_line(path)}"]
    assert len(found) == 1, f"docs/examples shows {first_line(path)!r} {len(found)} times"
    return found[0]


def name(job: Job) -> str:
    """That of the example which the command runs: its file, or the folder of its files."""
    program = Path(next(word for word in job.words.split() if word.startswith(blocks.EXAMPLES)))
    return program.stem if program.parent.name == "examples" else program.parent.name


def with_proof(job: Job, says: str) -> Job:
    """The command of an example with a comparison before its last line, which prints ``says``: scripts/proved.py."""
    example = f"examples/{name(job)}.py"
    command = job.command.replace(example, f"{ROOT}/tests/project/scripts/proved.py {name(job)}")
    assert command != job.command, job.command
    return dataclasses.replace(job, command=command, shown=[*job.shown, says])


def printed_as_shown(job: Job, done: subprocess.CompletedProcess[str], in_order: bool = False) -> None:
    """The job ended well, and has printed the lines of the page. ``in_order``: one after the other."""
    said = f"{job.command}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    differences = blocks.differences(job, done.stdout, done.stderr)
    assert not differences, f"{job.page.name}: {differences}\n{said}"
    if in_order:
        for shown, printed in zip(job.shown, done.stdout.splitlines(), strict=True):
            assert not blocks.differences(dataclasses.replace(job, shown=[shown]), printed, ""), (
                f"{printed!r}, not {shown!r}\n{said}"
            )
