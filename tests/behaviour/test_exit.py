"""The end of a program that has left something undone: no hang, no crash, no noise (traps 54, 55)."""

import re
import subprocess
import time

import pytest

from tests.faults.clock import FAST
from tests.support import ROOT, launch

pytestmark = pytest.mark.launch

SCRIPT = str(ROOT / "tests" / "behaviour" / "scripts" / "exits.py")


def job(case: str, **environ: str) -> subprocess.CompletedProcess[str]:
    done = launch(2, SCRIPT, case, timeout_s=45, env=environ)
    for rank in range(2):
        assert f"end of rank {rank}" in done.stdout, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    "case",
    [
        "nothing",
        "destroyed",
        "messages",
        "dropped_isend",
        "collective_that_ends",
        "daemon_thread",
        "handler",
        "users_mpi",
        "users_finalize",
        "users_finalize_first",
    ],
)
def test_clean_end(case: str) -> None:
    done = job(case)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    if case == "collective_that_ends":
        assert "the callback ran" in done.stdout
    if case == "handler":
        assert sorted(line for line in done.stdout.splitlines() if "handler" in line) == [
            f"handler of rank {rank}: 2.0 1.0 [0, 1]" for rank in range(2)
        ]
    if case == "users_finalize_first":
        assert done.stdout.count("MPI has been finalised") == 2, done.stdout


def test_without_finalize() -> None:
    """The user's own wish; Open MPI's mpiexec then complains by itself, but nothing crashes."""
    done = job("without_finalize")
    assert "Traceback" not in done.stderr, done.stderr
    assert "egmentation" not in done.stderr, done.stderr


@pytest.mark.parametrize("case", ["collective_that_never_ends", "timed_out_collective"])
def test_a_collective_that_never_ends(case: str) -> None:
    began = time.monotonic()
    done = job(case, **FAST)
    assert done.returncode != 0
    # whichever comes first: rank 0 leaves too and finds its thread stuck, or that thread learns that rank 1 has left
    leaves = "mpicoll: rank 0 leaves while a collective that it has started on group '0' has not ended" in done.stderr
    waits = re.search(r"all_reduce on group '0' \(rank 0 of 2\): .*[Rr]ank 1.*program has ended", done.stderr)
    assert leaves or waits, done.stderr
    assert time.monotonic() - began < 40
    if case == "timed_out_collective":
        assert "all_reduce on group '0' (rank 0 of 2): Timed out: no end within the timeout of 0.3 s" in done.stdout
        assert "barrier on group '0' (rank 0 of 2): the group is unusable since" in done.stdout
