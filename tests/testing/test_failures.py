"""A table of failures on several ranks: what is printed, in which order, and the exit status. The programs are in cases.py."""

import functools
import re
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support import run
from tests.testing.cases import ENDINGS, HEAD, IN_STEP, Case

pytestmark = [pytest.mark.launch, pytest.mark.timeout(180)]
SIZES = [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(8, marks=pytest.mark.slow)]


def start(folder: Path, program: str, ranks: int, *options: str, **env: str) -> tuple[int, str]:
    """Runs pytest on ``program`` by mpicoll.run. Returns the exit status and what was printed.

    MPICH's mpiexec alone sends SIGKILL to all ranks at once when one has died; below mpicoll.run they have time for a report.
    """
    (folder / "test_it.py").write_text(program)
    (folder / "pytest.ini").write_text("[pytest]\n")
    options = ("-m", "mpicoll.run", "-n", str(ranks), "-m", "pytest", "-p", "no:timeout", "-l", *options)
    done = run([sys.executable, *options], timeout_s=60, cwd=folder, env=env, fresh=True)
    return done.returncode, done.stdout + done.stderr


def words(pattern: str, ranks: int) -> str:
    others = "rank 0" if ranks == 2 else "ranks 0, 2" if ranks == 3 else f"ranks 0, 2-{ranks - 1}"
    return pattern.replace("OTHERS", others).replace("ALL", f"ranks 0-{ranks - 1}").replace("of N", f"of {ranks}")


def check(text: str, case: Case, ranks: int) -> None:
    """The words of the table, one after the other."""
    at = 0
    for pattern in case.said:
        found = re.compile(words(pattern, ranks), re.MULTILINE).search(text, at)
        assert found, f"not there, or not after the words before: {words(pattern, ranks)}\n{text}"
        at = found.start()


@functools.cache
def in_step(ranks: int) -> dict[str, tuple[str, str]]:
    """Outcome and text of each test of one job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = HEAD + "\n\n".join(case.program for case in IN_STEP)
        status, printed = start(folder, program, ranks, "--junitxml=x.xml", "--ranks-timeout=30")
        assert status == 1, printed
        found = {}
        for case in ElementTree.parse(folder / "x.xml").getroot().iter("testcase"):
            results = [part for part in case if part.tag in ("failure", "error", "skipped")]
            outcome = {"failure": "failed"}.get(results[0].tag, results[0].tag) if results else "passed"
            text = "\n".join(f"{part.get('message')}\n{part.text or ''}" for part in results)
            found[case.get("name", "").removesuffix("[8]")] = (outcome, text)
    return found


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("case", IN_STEP, ids=lambda case: case.what)
def test_a_failure_that_leaves_the_ranks_in_step(case: Case, ranks: int) -> None:
    outcome, text = in_step(ranks)[f"test_{case.name}"]
    assert outcome == case.outcome, text
    check(text, case, ranks)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.what, marks=[pytest.mark.slow] if case.slow else []) for case in ENDINGS]
)
def test_a_failure_that_ends_the_job(case: Case, ranks: int, tmp_path: Path) -> None:
    status, printed = start(tmp_path, HEAD + case.program, ranks, "--ranks-timeout=2", _MPICOLL_TIME_SCALE="0.03")
    assert status != 0 if case.outcome == "not 0" else status == int(case.outcome), printed
    check(printed, case, ranks)
