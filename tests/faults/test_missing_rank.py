"""One rank does not come: every collective and message ends within its limit and 2 seconds, and names the rank.

Asynchronous ones and barriers raise OperationTimeout. A blocking one is inside MPI: then the job ends.
"""

import re
import time

import pytest

from tests.faults.clock import began, clock
from tests.faults.mismatches import OPERATIONS
from tests.support import ROOT, launch

__all__ = ["clock"]

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]

SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "missing.py")
LIMIT_S = 2.0
END_S = 4.0  # for the ranks to show where they are, and for mpiexec to end them
COLLECTIVES = (*OPERATIONS, "all_reduce in shared memory", "all_reduce_coalesced")
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
MESSAGES = ("send", "recv", "recv from anybody", "send_object_list", "recv_object_list")
RAISING = (*COLLECTIVES, "isend", "irecv", "irecv from anybody", "batch_isend_irecv", "blocking barrier", "monitored_barrier")
DOORS = ("mpicoll", "torch")
QUICK = {
    *(("mpicoll", operation) for operation in ("all_reduce", "send", "recv", "recv from anybody")),
    ("torch", "all_gather_object"),
}
LAST = r"its last collective on this group is number 1, all_reduce\(SUM, float32, 4194304 elements\), which has ended"


def named(operation: str) -> str:
    """What the error says of rank 1."""
    if operation == "monitored_barrier":
        return r"ranks? 1 did not"
    if "from anybody" in operation:
        return "It waits for any rank"
    return rf"Rank 1 (has not come|is the other side): {LAST}; its process \d+ runs"


@pytest.mark.parametrize(
    ("door", "operation"),
    [
        pytest.param(door, operation, marks=[] if (door, operation) in QUICK else pytest.mark.slow)
        for door in DOORS
        for operation in (*COLLECTIVES, *OBJECTS, *MESSAGES)
        if operation != "barrier"  # raises, see below
    ],
)
def test_blocking(door: str, operation: str, clock: dict[str, str]) -> None:
    """The lines on standard error say what waits, for whom and where in the program; then the job ends."""
    limit_s = 1.0 if clock else LIMIT_S
    done = launch(2, SCRIPT, door, str(limit_s), "blocking", operation, timeout_s=60, env=clock)
    took = time.time() - began(done.stdout)
    assert done.returncode != 0
    assert "returned" not in done.stdout
    assert took < limit_s + 2 + END_S, f"{took:.1f} s\n{done.stderr}"
    assert re.search(named(operation), done.stderr), done.stderr
    assert "missing.py" in done.stderr, "the place in the program"
    if operation in MESSAGES and (door == "torch" or operation.endswith("_object_list")):
        assert "uncaught OperationTimeout; aborting the job" in done.stderr, "torch waits for a Work"
    else:
        assert re.search(rf"^mpicoll: \w+ on group '\w+' \(rank 0 of 2\): no end after {limit_s:g}\.", done.stderr, re.M), (
            done.stderr
        )
        assert f" exceeded the group's timeout of {limit_s:g} s; aborting the job" in done.stderr, done.stderr


@pytest.mark.parametrize("door", DOORS)
def test_raising(door: str) -> None:
    done = launch(2, SCRIPT, door, str(LIMIT_S), "raising", *RAISING, timeout_s=60)
    for operation in RAISING:
        found = re.search(rf"^{operation} after ([\d.]+) s: (.*)$", done.stdout, re.MULTILINE)
        assert found, f"{operation}: {done.stdout}{done.stderr}"
        assert float(found[1]) < LIMIT_S + 2, found[0]
        assert re.search(named(operation), found[2]), found[0]
