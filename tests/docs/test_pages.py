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
JOBS = [job for page in PAGES for job in blocks.jobs(page)]
SESSIONS = [page for page in PAGES if blocks.session(page).strip()]


def name(case: Job | Path) -> str:
    if isinstance(case, Job):
        return f"{case.page.stem}: {case.command.removeprefix('$ ')}"
    return case.stem


def test_pages_show_commands() -> None:
    """In another notation none would be found, and all would pass."""
    pages = {job.page.stem for job in JOBS}
    assert {"README", "index", "install", "quickstart", "messages", "collectives", "data-parallel"} <= pages
    assert {"quickstart", "concepts"} <= {page.stem for page in SESSIONS}


@pytest.mark.launch
@pytest.mark.parametrize("job", JOBS, ids=name)
def test_a_command_prints_what_is_shown(job: Job, tmp_path: Path) -> None:
    for file, text in job.files.items():
        (tmp_path / file).write_text(text)
    done = run([sys.executable, "-m", "mpicoll.run", *shlex.split(job.words)], cwd=tmp_path, env=job.environment)
    said = f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert (done.returncode != 0) == job.fails, said
    differences = blocks.differences(job, done.stdout, done.stderr)
    assert not differences, f"{differences}\n{said}"


@pytest.mark.launch
@pytest.mark.parametrize("page", SESSIONS, ids=name)
def test_a_session_answers_what_is_shown(page: Path) -> None:
    done = run([sys.executable, str(Path(__file__).parent / "scripts/session.py"), str(page)])
    assert done.returncode == 0, done.stdout + done.stderr
