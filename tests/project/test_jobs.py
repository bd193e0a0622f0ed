"""tests/support/jobs.py: how it reads what jobs print."""

from __future__ import annotations

import subprocess

from tests.support.jobs import reports


def test_lines_of_two_ranks_that_came_mixed() -> None:
    """Rank 0 prints unbuffered, the line first and then its end; the report of rank 1 comes between."""
    printed = "{'loss': '4.6'}" + '{"rank": 1, "losses": []}\n' + '\n{"rank": 0, "losses": [4.6]}\n'
    found = reports(subprocess.CompletedProcess(["mpirun"], 0, printed, ""))
    assert found == [{"rank": 0, "losses": [4.6]}, {"rank": 1, "losses": []}]
