"""What the pages show: their commands print it, and their Python sessions are doctests. blocks.py says which blocks these are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.blocks import Job
from tests.support import ROOT, is_open_mpi, run

DOCS = ROOT / "docs"
# A translation shows what its original shows: tests/project/test_translations.py compares.
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "zh"))]
CONSOLES = [console for page in PAGES for console in blocks.consoles(page)]
# Commands that need hosts are those of tests/behaviour/test_two_machines.py, those that run examples of tests/project.
HERE = [console for console in CONSOLES if not any(job.needs_hosts or job.runs_example for job in console)]
MARKS = {
    "companions": pytest.mark.companion,
    "Open MPI 5": pytest.mark.skipif(not is_open_mpi(), reason="MPICH ends the job when a rank dies"),
}
SESSIONS = [page for page in PAGES if blocks.session(page).strip()]


def name(case: list[Job] | Path) -> str:
    if isinstance(case, Path):
        return case.stem
    return f"{case[0].page.stem}: {'; '.join(job.command.removeprefix('$ ') for job in case)}"


def marks(console: list[Job]) -> list[pytest.MarkDecorator]:
    return [MARKS[job.needs] for job in console[:1] if job.needs]


def test_pages_show_commands() -> None:
    """In another notation none would be found, and all would pass."""
    pages = {console[0].page.stem for console in HERE}
    tutorials = {page.stem for page in (DOCS / "tutorials").glob("*.md")}
    assert {"README", "index", "install", "quickstart", "messages", *tutorials} <= pages
    assert {"quickstart", "concepts"} <= {page.stem for page in SESSIONS}


@pytest.mark.launch
@pytest.mark.parametrize("console", [pytest.param(console, marks=marks(console), id=name(console)) for console in HERE])
def test_commands_print_what_is_shown(console: list[Job], tmp_path: Path) -> None:
    for job in console:
        job.write_files(tmp_path)
        done = run(job.argv, cwd=tmp_path, env=job.environment)
        said = f"{job.command}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
        assert (done.returncode != 0) == job.fails, said
        differences = blocks.differences(job, done.stdout, done.stderr)
        assert not differences, f"{differences}\n{said}"


@pytest.mark.launch
@pytest.mark.parametrize("page", SESSIONS, ids=name)
def test_a_session_answers_what_is_shown(page: Path) -> None:
    done = run([sys.executable, str(Path(__file__).parent / "scripts/session.py"), str(page)])
    assert done.returncode == 0, done.stdout + done.stderr
