"""One rank does not come: every collective and message ends within its limit and 2 seconds, and names the rank.

Asynchronous ones and barriers raise OperationTimeout. A blocking one is inside MPI: then the job ends.
"""

from __future__ import annotations

import re
import time

import pytest

from tests.faults.mismatches import OPERATIONS
from tests.support import ROOT, launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]

SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "missing.py")
LIMIT_S = 2.0
END_S = 4.0  # for the ranks to show where they are, and for mpiexec to end them
COLLECTIVES = (*OPERATIONS, "all_reduce in shared memory", "all_reduce_coalesced")
OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
MESSAGES = ("send", "recv", "recv from anybody", "send_object_list", "recv_object_list")
ASYNCHRONOUS = (*COLLECTIVES, "isend", "irecv", "irecv from anybody", "batch_isend_irecv")
TOGETHER = 6  # asynchronous operations in a job; each of them keeps a thread inside MPI
DOORS = ("mpicoll", "torch")
QUICK = {("mpicoll", "reduce"), ("torch", "all_gather_object"), ("mpicoll", "send"), ("torch", "barrier")}


def named(operation: str) -> str:
    """What the error says of rank 1."""
    if operation == "monitored_barrier":
        return r"ranks? 1 did not"
    if "from anybody" in operation:
        return "It waits for any rank"
    return r"Rank 1 (has not come|is the other side): .*its process \d+ runs"


@pytest.mark.parametrize(
    ("door", "operation"),
    [
        pytest.param(door, operation, marks=[] if (door, operation) in QUICK else pytest.mark.slow)
        for door in DOORS
        for operation in (*COLLECTIVES, "monitored_barrier", *OBJECTS, *MESSAGES)
        if (door, operation) != ("torch", "monitored_barrier")  # torch has it for its own backends
    ],
)
def test_blocking(door: str, operation: str) -> None:
    done = launch(2, SCRIPT, door, "blocking", operation, timeout_s=60)
    took = time.time() - began(done.stdout)
    assert done.returncode != 0
    assert "returned" not in done.stdout
    assert took < LIMIT_S + 2 + END_S, f"{took:.1f} s\n{done.stderr}"
    assert re.search(named(operation), done.stderr), done.stderr


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("operations", [ASYNCHRONOUS[i : i + TOGETHER] for i in range(0, len(ASYNCHRONOUS), TOGETHER)])
def test_asynchronous(door: str, operations: tuple[str, ...]) -> None:
    done = launch(2, SCRIPT, door, "asynchronous", *operations, timeout_s=60)
    for operation in operations:
        found = re.search(rf"^{operation} after ([\d.]+) s: (.*)$", done.stdout, re.MULTILINE)
        assert found, f"{operation}: {done.stdout}{done.stderr}"
        assert float(found[1]) < LIMIT_S + 2, found[0]
        assert re.search(named(operation), found[2]), found[0]


def began(output: str) -> float:
    """When rank 0 began to wait, by the clock."""
    found = re.search(r"^began ([\d.]+)$", output, re.MULTILINE)
    assert found, output
    return float(found[1])
