"""What the pages show: their commands print it, and their Python sessions are doctests. blocks.py says which blocks these are."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.blocks import Job
from tests.support import ROOT, run

DOCS = ROOT / "docs"
# A translation shows what its original shows: tests/project/test_translations.py compares.
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "zh"))]
CONSOLES = [console for page in PAGES for console in blocks.consoles(page)]
# Commands that need hosts are those of tests/behaviour/test_two_machines.py.
HERE = [console for console in CONSOLES if not any(job.needs_hosts for job in console)]
SESSIONS = [page for page in PAGES if blocks.session(page).strip()]


def name(case: list[Job] | Path) -> str:
    if isinstance(case, Path):
        return case.stem
    return f"{case[0].page.stem}: {'; '.join(job.command.removeprefix('$ ') for job in case)}"


def test_pages_show_commands() -> None:
    """In another notation none would be found, and all would pass."""
    pages = {console[0].page.stem for console in HERE}
    tutorials = {page.stem for page in (DOCS / "tutorials").glob("*.md")}
    assert {"README", "index", "install", "quickstart", "messages", *tutorials} <= pages
    assert {"quickstart", "concepts"} <= {page.stem for page in SESSIONS}


@pytest.mark.launch
@pytest.mark.parametrize("console", HERE, ids=name)
def test_commands_print_what_is_shown(console: list[Job], tmp_path: Path) -> None:
    for job in console:
        job.write_files(tmp_path)
        done = run([sys.executable, "-m", "mpicoll.run", *shlex.split(job.words)], cwd=tmp_path, env=job.environment)
        said = f"{job.command}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
        assert (done.returncode != 0) == job.fails, said
        differences = blocks.differences(job, done.stdout, done.stderr)
        assert not differences, f"{differences}\n{said}"


@pytest.mark.launch
@pytest.mark.parametrize("page", SESSIONS, ids=name)
def test_a_session_answers_what_is_shown(page: Path) -> None:
    done = run([sys.executable, str(Path(__file__).parent / "scripts/session.py"), str(page)])
    assert done.returncode == 0, done.stdout + done.stderr
