"""No call waits longer than its limit and 2 seconds, and the missing rank is named where ranks make groups.

Where an exception can be raised, it is. A call that is inside MPI cannot be interrupted: then the job ends.
"""

import re
import time

import pytest

from tests.faults.clock import began
from tests.support import ROOT, launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(200)]

SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "late.py")
DOORS = ("mpicoll", "torch")
LIMIT_S = 1.0
END_S = 10.0  # for mpiexec to end the other ranks
INSIDE = "new_group: Timed out: no end within the timeout of 1 s, although all of its ranks had come"


def test_groups_that_a_rank_does_not_come_to() -> None:
    """By both doors. Both ranks raise, with the name of the missing one; then they try again together, and it works."""
    done = launch(2, SCRIPT, "all in one job", timeout_s=100)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for call, times in {"init_process_group": 2, "init_rpc": 1, "new_group": 3}.items():  # split_group makes one, too
        for rank in range(2):
            named = rf"{call} \(rank {rank} of 2\): Timed out: rank 1 did not come within the timeout of 1 s"
            found = re.findall(rf"rank {rank} after ([\d.]+) s: {named}", done.stdout)
            assert len(found) == times, f"{call} on rank {rank}: {said}"
            assert all(float(took) < LIMIT_S + 2 for took in found), said
    for works in ("mpicoll 2", "torch.distributed 2", "DONE"):
        assert all(f"rank {rank}: {works}\n" in done.stdout for rank in range(2)), said


@pytest.mark.parametrize("door", DOORS)
def test_a_rank_that_does_not_start_mpi(door: str) -> None:
    """MPI_Init of the others never returns: the job ends, and they say which rank has not come."""
    done = launch(2, SCRIPT, "MPI is not started", door, timeout_s=100, fresh=True)
    ended = time.time()
    assert done.returncode != 0
    expected = "rank 0: init_process_group: Timed out: no end within the timeout of 1 s: rank 1 has not started MPI; aborting"
    assert expected in done.stderr, done.stderr
    assert ended - began(done.stdout) < LIMIT_S + 2 + END_S


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("stopped before", "new_group (rank 0 of 2): Timed out: rank 1 did not come within the timeout of 1 s"),
        ("stopped inside", INSIDE),
        ("stopped inside, under the lock", INSIDE),
    ],
)
def test_a_rank_that_stops(case: str, expected: str) -> None:
    """Under the lock: at MPI_THREAD_SERIALIZED. The watchdog would wait for the lock that the thread in new_group holds."""
    done = launch(2, SCRIPT, case, "mpicoll", timeout_s=60)
    ended = time.time()
    assert done.returncode != 0
    assert expected in done.stderr, done.stderr
    assert ended - began(done.stdout) < LIMIT_S + 2 + END_S
