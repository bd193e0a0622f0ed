"""Every block of code in the pages is tested, or stands in a table here with the reason.

test_pages.py runs named files, commands and sessions (blocks.py). What is left: excerpts of programs that run elsewhere,
commands for a shell, and what only a machine of another kind could run.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.test_pages import PAGES
from tests.support import ROOT, run

PAGES = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)

# A page and the first line of a block: the program that has its lines, which a test runs. "..." stands for what is left out.
EXCERPTS = {
    ("integrations", "arguments = TrainingArguments("): "examples/hf_trainer.py",
    ("integrations", "ranks = MPIEnvironment()"): "examples/lightning_mpi.py",
    ("integrations", "deepspeed.init_distributed("): "tests/companions/scripts/deepspeed_zero.py",
    ("testing", "def test_strided_all_reduce_is_in_place("): "tests/c10d/test_collectives.py",
}
# A page and the first line of a block that is run elsewhere, or nowhere.
ELSEWHERE = {
    ("sites", "signal.signal(signal.SIGUSR1, ask)"): "tests/cluster/test_slurm.py runs it",
    ("integrations", "import heat as ht"): "Heat does not import with the pinned torch; run by hand",
    ("migration", "hvd.init()"): "Horovod is not installed",
    ("migration", "import oneccl_bindings_for_pytorch"): "oneCCL is not installed",
}
# Programs of others. bash parses their commands; nothing runs them.
NOT_OURS = {
    "apptainer", "bash", "docker", "export", "mkdir", "module", "mpiexec", "mpirun", "python3", "srun", "torchrun",
}  # fmt: skip
OURS = re.compile(r"(?:\w+=\S+ )*(?:mpicoll|python -m mpicoll\.run|python -m mpicoll\.doctor)\b")
PIP = re.compile(r"(?:\S*/)?pip install (.*)")


def blocks_of(page: Path, *languages: str) -> list[str]:
    return [text for _, language, text in FENCE.findall(page.read_text()) if language in languages]


def cases(*languages: str) -> list[tuple[Path, str]]:
    return [(page, text) for page in PAGES for text in blocks_of(page, *languages)]


def used(page: Path) -> set[str]:
    """The files that the commands of a page run, and those that these import."""
    jobs = blocks.jobs(page)
    names = {word for job in jobs for word in shlex.split(job.words)}
    found: set[str] = set()
    while more := {name for job in jobs for name in job.files if name in names} - found:
        found |= more
        texts = [job.files[name] for job in jobs for name in more if name in job.files]
        names |= {f"{name}.py" for text in texts for name in re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_runs(page: Path) -> None:
    runs = used(page)
    left = []
    for text in blocks_of(page, "python"):
        name = blocks.NAMED["python"].match(text)
        first = text.splitlines()[0]
        known = [key for key in [*EXCERPTS, *ELSEWHERE] if key[0] == page.stem and key[1] in text]
        if not (">>> " in text or known or (name and name[1] in runs)):
            left.append(first)
    assert not left, f"{page}: no test runs the blocks that begin with {left}"


@pytest.mark.parametrize(("page", "begin"), [*EXCERPTS, *ELSEWHERE], ids=str)
def test_tables_are_up_to_date(page: str, begin: str) -> None:
    assert any(page == path.stem and begin in text for path, text in cases("python"))


@pytest.mark.parametrize(("key", "program"), EXCERPTS.items(), ids=str)
def test_excerpts_are_lines_of_the_program(key: tuple[str, str], program: str) -> None:
    (text,) = [text for path, text in cases("python") if path.stem == key[0] and key[1] in text]
    words = "".join((ROOT / program).read_text().split()).replace("(backend)", '("mpi")')  # an argument of the program
    for line in text.splitlines():
        for part in "".join(line.partition("  #")[0].split()).split("..."):
            assert part in words, f"{key[0]}: {line!r} is not in {program}"


def test_console_blocks_are_commands_that_run() -> None:
    left = [(page.stem, text) for page, text in cases("console") if not blocks.COMMAND.match(text)]
    assert not left, "blocks.py does not know these commands"


def commands() -> Iterator[tuple[str, str]]:
    """Each line of the blocks for a shell, without its comment. A script, which begins with "#!", is one command."""
    for page, text in cases("sh"):
        if text.startswith("#!"):
            yield page.stem, text
            continue
        for line in text.splitlines():
            yield from ((page.stem, part.strip()) for part in re.sub(r"(^| )#.*", "", line).split("&&") if part.strip())


COMMANDS = list(commands())


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_shell_commands_are_known(page: str, command: str) -> None:
    assert subprocess.run(["bash", "-n"], input=command, text=True).returncode == 0
    if OURS.match(command) or command.startswith(("#!", ". ", "ln ", "python -m pytest", "python -m venv")):
        return
    if (pip := PIP.match(command)) is not None:
        table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
        extras = re.findall(r"^(\w+) = \[", table, re.MULTILINE)
        assert {name for names in re.findall(r"\[([\w,]+)\]", pip[1]) for name in names.split(",")} <= set(extras)
        return
    assert command.split()[0] in NOT_OURS, f"{page}: is this command right? {command}"


@pytest.mark.launch
@pytest.mark.parametrize(("page", "command"), [case for case in COMMANDS if OURS.match(case[1]) and not case[1].startswith("#!")])
def test_commands_of_mpicoll_are_taken(page: str, command: str, tmp_path: Path) -> None:
    """What they start is not run."""
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    (tmp_path / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    for name in ("train.py", "examples/digits_ddp.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    words = shlex.split(re.sub(r"^(\w+=\S+ )*", "", command).replace("$PBS_NODEFILE", "nodes"))
    words = words[1:] if words[0] == "mpicoll" else words[2:]
    subcommand = words[0].removeprefix("mpicoll.")
    option = ["--dry-run"] if subcommand == "run" else ["--help"]
    done = run([sys.executable, "-m", f"mpicoll.{subcommand}", *option, *words[1:]], cwd=tmp_path)
    if "--fault-tolerant" in words and "MPICH" in done.stderr:
        return  # refused there, as the page says
    assert done.returncode == 0, done.stderr
    if subcommand == "run":
        line = shlex.split(done.stdout)  # mpiexec and its arguments
        missing = [word for word in words if word.endswith(".py") and word not in line]
        assert not missing, f"{missing} not in {done.stdout}"
