"""Windows in jobs of their own: peers that do not signal or that die, other nodes, other thread levels, the end of a job."""

import re

import pytest

from tests.faults.clock import FAST
from tests.support import ROOT, is_open_mpi, launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]
SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "signalling.py")
LATE = r"wait_signal on group '\w+' \(rank 0 of 2\): "
OTHER = r"Rank 1 is the other side: its last collective on this group is number 1, tensor_register\(\), which has ended"


@pytest.mark.parametrize("case", ["serialized", "apart", "checked"])
def test_everything_works(case: str) -> None:
    done = launch(3, SCRIPT, case, timeout_s=90)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line for line in lines if line.startswith("rank")] == [f"rank {rank}: right" for rank in (0, 0, 1, 1, 2, 2)]
    if case == "apart":
        assert lines[0].startswith("ValueError: map_remote_tensor: rank 1: its rank is on another node"), lines


def test_a_tensor_that_is_registered_until_the_end() -> None:
    """MPI_Finalize of MPICH fails if a window is left."""
    done = launch(3, SCRIPT, "left", timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n" * 3, "")


def test_no_signal_in_time() -> None:
    done = launch(2, SCRIPT, "timeout", timeout_s=60, env=FAST)
    assert re.search(f"OperationTimeout: {LATE}Timed out: no end within the timeout of 1 s. {OTHER}", done.stdout), done


def test_a_blocking_wait_that_cannot_end() -> None:
    done = launch(2, SCRIPT, "blocking", timeout_s=60, env=FAST)
    assert done.returncode != 0
    assert re.search(f"OperationTimeout: {LATE}Timed out: no end within the timeout of 3 s. {OTHER}", done.stderr), done.stderr


@pytest.mark.skipif(not is_open_mpi(), reason="MPICH ends the job when a rank dies")
def test_a_rank_dies() -> None:
    """The rank that waits for its signal gets PeerLost, and so do later calls. MPI's windows would hang: they are refused."""
    done = launch(3, SCRIPT, "death", options=["--with-ft", "ulfm"], timeout_s=90, env=FAST)
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 6, done
    refused, *lost = lines[:4]
    assert refused.startswith("MpicollError: put on group '0' (rank 2 of 3): MPI cannot access the memory of rank 0 in a job"), (
        lines
    )
    for operation, line in zip(("put", "signal", "wait_signal"), lost, strict=True):
        assert re.match(rf"PeerLost: {operation} on group '0' \(rank 0 of 3\): .*rank 1 has died", line), lines
    assert lines[4:] == ["end: 1.0"] * 2
