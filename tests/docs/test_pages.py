"""What the pages show: their commands print it, and their Python sessions are doctests. blocks.py says which blocks these are."""

import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.docs import blocks, programs
from tests.docs.blocks import Job
from tests.docs.together import Done, Program, run_together
from tests.support import ROOT, is_open_mpi, run

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "zh"))]
CONSOLES = [console for page in PAGES for console in blocks.consoles(page)]
# tests/behaviour/test_two_machines.py has the commands that need hosts, tests/project those of docs/examples.
HERE = [console for console in CONSOLES if not any(job.needs_hosts for job in console) and console[0].page not in programs.PAGES]
MARKS = {
    "companions": pytest.mark.companion,
    "Open MPI 5": pytest.mark.skipif(not is_open_mpi(), reason="MPICH ends the job when a rank dies"),
}
SESSIONS = [page for page in PAGES if blocks.session(page).strip()]
TOGETHER_LIMIT_S = 240  # seconds for all programs of one job

# Commands that each have a job of their own: the first that a reader types, and what cannot be in one process with others.
FIRST = {"README", "quickstart"}
APART = {
    ("fsdp2", "save.py"): "resume.py reads what it leaves",
    ("fsdp2", "resume.py"): "reads what save.py leaves",
}


def script(job: Job) -> str:
    return next((word for word in job.words.split() if word.endswith(".py")), "")


def ranks_together(job: Job) -> int | None:
    """The number of ranks if the command can be one of several programs of a job; None if it has a job of its own."""
    words = re.fullmatch(r"-n (\d) \w+\.py( \w+)*", job.words)
    apart = job.page.stem in FIRST or (job.page.stem, script(job)) in APART
    return None if words is None or job.fails or job.environment or job.needs or apart else int(words[1])


ALONE = [console for console in HERE if None in map(ranks_together, console)]
TOGETHER = [job for console in HERE if console not in ALONE for job in console]


def name(case: list[Job] | Path) -> str:
    if isinstance(case, Path):
        return case.stem
    return f"{case[0].page.stem}: {'; '.join(job.command.removeprefix('$ ') for job in case)}"


def marks(console: list[Job]) -> list[pytest.MarkDecorator]:
    return [MARKS[job.needs] for job in console[:1] if job.needs]


def printed_what_is_shown(job: Job, done: Done) -> None:
    said = f"{job.page.stem}: {job.command}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert (done.returncode != 0) == job.fails, said
    differences = blocks.differences(job, done.stdout, done.stderr)
    assert not differences, f"{differences}\n{said}"


def test_pages_show_commands() -> None:
    """In another notation none would be found, and all would pass."""
    pages = {console[0].page.stem for console in HERE}
    tutorials = {page.stem for page in (DOCS / "tutorials").glob("*.md")}
    assert {"README", "quickstart", "messages", *tutorials} <= pages
    assert {"quickstart", "concepts"} <= {page.stem for page in SESSIONS}
    assert len(TOGETHER) > 10
    assert {(job.page.stem, script(job)) for console in ALONE for job in console} >= set(APART)


@pytest.mark.launch
@pytest.mark.timeout(3 * TOGETHER_LIMIT_S)
@pytest.mark.parametrize("ranks", sorted(set(map(ranks_together, TOGETHER))))
def test_programs_of_one_job_print_what_is_shown(ranks: int, tmp_path: Path) -> None:
    entries = []
    for number, job in enumerate(job for job in TOGETHER if ranks_together(job) == ranks):
        folder = tmp_path / f"page-{number}"
        folder.mkdir()
        job.write_files(folder)
        entries.append(Program(shlex.split(job.words)[2:], folder, partial(printed_what_is_shown, job)))
    run_together(ranks, entries, tmp_path, TOGETHER_LIMIT_S)


@pytest.mark.launch
@pytest.mark.parametrize("console", [pytest.param(console, marks=marks(console), id=name(console)) for console in ALONE])
def test_commands_print_what_is_shown(console: list[Job], tmp_path: Path) -> None:
    for job in console:
        job.write_files(tmp_path)
        printed_what_is_shown(job, run(job.argv, cwd=tmp_path, env=job.environment))


@pytest.mark.launch
@pytest.mark.parametrize("page", SESSIONS, ids=name)
def test_a_session_answers_what_is_shown(page: Path) -> None:
    done = run([sys.executable, str(Path(__file__).parent / "scripts/session.py"), str(page)])
    assert done.returncode == 0, done.stdout + done.stderr
