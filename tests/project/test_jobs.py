"""How jobs of tests are run (tests/support), and how what they print is read (tests/support/jobs.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpicoll.bench.jobs import NEVER_BEGAN
from tests.support import run
from tests.support.jobs import reports

# A launcher that fails as Open MPI's does now and then, in its first ``failures`` runs. It counts its runs in a file.
LAUNCHER = f"""
import sys
with open(sys.argv[1], "a+") as file:
    file.write("run ")
    file.seek(0)
    runs = len(file.read().split())
sys.exit("{NEVER_BEGAN}" if runs <= int(sys.argv[2]) else None)
"""


def test_lines_of_two_ranks_that_came_mixed() -> None:
    """Rank 0 prints unbuffered, the line first and then its end; the report of rank 1 comes between."""
    printed = "{'loss': '4.6'}" + '{"rank": 1, "losses": []}\n' + '\n{"rank": 0, "losses": [4.6]}\n'
    found = reports(subprocess.CompletedProcess(["mpirun"], 0, printed, ""))
    assert found == [{"rank": 0, "losses": [4.6]}, {"rank": 1, "losses": []}]


@pytest.mark.launch
@pytest.mark.parametrize(("failures", "runs", "status"), [(0, 1, 0), (1, 2, 0), (2, 2, 1)])
def test_a_job_that_the_launcher_has_not_begun_is_run_once_more(failures: int, runs: int, status: int, tmp_path: Path) -> None:
    count = tmp_path / "runs"
    done = run([sys.executable, "-c", LAUNCHER, str(count), str(failures)])
    assert done.returncode == status, done.stderr
    assert count.read_text().split() == ["run"] * runs
