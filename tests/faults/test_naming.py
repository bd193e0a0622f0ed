"""What waits for another rank names it; ranks that call different collectives end the job. Each test is a job of its own."""

import re
import subprocess
import time

import pytest

from tests.faults.clock import FAST, began, clock
from tests.support import ROOT, is_open_mpi, launch

__all__ = ["clock"]

pytestmark = pytest.mark.launch

SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "waits.py")
LAST = r"its last collective on this group is number 100, all_reduce\(SUM, float32, 2 elements\), which has ended"
RUNS, STOPPED = r"its process \d+ runs", r"its process \d+ is stopped \(SIGSTOP\)"


def job(how: str, timeout_s: float = 30, **environ: str) -> subprocess.CompletedProcess[str]:
    return launch(2, SCRIPT, how, str(timeout_s), timeout_s=40, env={**FAST, **environ})


@pytest.mark.parametrize("how", ["other collective", "torch other collective"])
def test_different_collectives_end_the_job(how: str) -> None:
    """They return on all ranks; a look at the ledger a second later names both calls and shows both programs."""
    done = job(how)
    assert done.returncode != 0
    said = "Rank 0: all_reduce(SUM, float32, 2 elements); rank 1: broadcast(float32, 2 elements, root 1)."
    assert f"mpicoll: group '0', collective number 101: the ranks call different collectives. {said}" in done.stderr, done.stderr
    assert "the ranks call different collectives; aborting the job" in done.stderr, done.stderr
    assert len(re.findall(r"this rank is here: \S*waits\.py:\d+ in \S+$", done.stderr, re.MULTILINE)) == 2, done.stderr


def test_what_one_rank_has_refused_is_said() -> None:
    done = job("refuses and goes on")
    assert done.returncode != 0
    refusal = "all_reduce, refused: TypeError: all_reduce: tensor must be a torch.Tensor, got list"
    said = (
        f"collective number 101: rank 1 refused the arguments. Rank 0: all_reduce(SUM, float32, 2 elements); rank 1: {refusal}."
    )
    assert said in done.stderr, done.stderr


def test_different_collectives_of_which_one_raises() -> None:
    """The error names both calls. If the program catches it, the other rank goes on with what it has got, so the job ends."""
    done = job("receives too little")
    assert done.returncode != 0
    calls = "Rank 0: broadcast(float32, 4 elements, root 0); rank 1: broadcast(float32, 2 elements, root 0)"
    assert f"the ranks' calls of broadcast differ in the number of elements. {calls}" in done.stdout, done.stdout
    assert "collective number 101: the ranks' calls of broadcast differ in the number of elements. Rank 0" in done.stderr, (
        done.stderr
    )


def test_what_all_ranks_refuse_is_no_fault_and_one_that_comes_late_is_named() -> None:
    """Each has an error of its own: they name different ranks."""
    done = job("goes on")
    said = r"mpicoll: all_reduce on group '0' \(rank 0 of 2\) has waited for [12] s. Rank 1 has not come: "
    assert re.fullmatch(rf"{said}{LAST}; {RUNS}\n", done.stderr), done.stderr
    assert done.returncode == 0
    assert done.stdout.count("caught") == 2, done.stdout
    assert done.stdout.count("survived with [1.0, 1.0]") == 2, done.stdout


def test_a_rank_that_stops_is_named() -> None:
    """One that runs: test_missing_rank.py."""
    done = job("stops", timeout_s=2)
    assert done.returncode != 0
    assert re.search(f"all_reduce .* no end after .*Rank 1 has not come: {STOPPED}; .*{LAST}", done.stderr), done.stderr


@pytest.mark.parametrize("node_size", ["2", "1"])
def test_an_exception_that_leaves_a_collective_half_done_is_named(node_size: str) -> None:
    """On the rank itself the group is unusable; the others, which wait in the collective, learn it within a second."""
    done = job("leaves", _MPICOLL_NODE_SIZE=node_size)
    took_s = time.time() - began(done.stdout)
    assert done.returncode != 0
    assert "caught\nbarrier on group '0' (rank 1 of 2): the group is unusable" in done.stdout, done.stdout
    assert "all_reduce on group '0' (rank 1 of 2): Late has left it half done" in done.stdout, done.stdout
    call = r"its collective 101(?: on this group)?, all_reduce\(SUM, float32, 262144 elements\), half done"
    assert re.search(f"all_reduce on group '0' .*an exception has left {call}", done.stderr), done.stderr
    assert "all_reduce can never end; aborting the job" in done.stderr, done.stderr
    assert took_s < 1.3 + 3, f"{took_s:.1f} s"  # until it is seen, and to show where the ranks are


SILENT = r"it has not answered for \d s: it is stopped, its host or network is lost, or a call in its program holds Python's lock"
SLOW = pytest.mark.slow
ELSEWHERE = r"its process \d+ on \S+ runs"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("misses an all_reduce", f"all_reduce .* no end after .*Rank 1 has not come: {LAST}; {ELSEWHERE}"),
        pytest.param("misses a barrier", f"OperationTimeout: barrier .*Rank 1 has not come: {LAST}; {ELSEWHERE}", marks=SLOW),
        pytest.param("misses an asynchronous one", f"OperationTimeout: .*Rank 1 has not come: {LAST}; {ELSEWHERE}", marks=SLOW),
        pytest.param("sends nothing", f"recv .* no end after .*Rank 1 is the other side: {LAST}; {ELSEWHERE}", marks=SLOW),
        ("sends nothing to irecv", f"OperationTimeout: irecv .*Rank 1 is the other side: {LAST}; {ELSEWHERE}"),
        ("stops", f"all_reduce .* no end after .*Rank 1 has not come: {SILENT}"),
    ],
)
def test_a_rank_of_another_node_is_named(how: str, expected: str, clock: dict[str, str]) -> None:
    """It is asked by messages, because its calls cannot be seen."""
    timeout_s = 6 if not clock else 3 if how == "stops" else 1.5
    done = launch(2, SCRIPT, how, str(timeout_s), timeout_s=40, env={"_MPICOLL_NODE_SIZE": "1", **clock})
    assert done.returncode != 0
    assert re.search(expected, done.stderr), done.stderr
    if "no end after" in expected and how != "stops":
        assert "rank 1 (group '0'): another rank asks where this one is; this rank is here: " in done.stderr, done.stderr


def test_another_collective_on_another_node_is_named() -> None:
    """Once a rank waits in it: ranks of different nodes do not compare what has ended."""
    done = job("meets a barrier", _MPICOLL_NODE_SIZE="1")
    assert done.returncode != 0
    calls = {"barrier()", "all_gather(float32, 4 elements)"}
    said = re.search(
        r"collective number 101: the ranks call different collectives. Rank \d: (.*?); rank \d: (.*?)\. ", done.stderr
    )
    assert said is not None, done.stderr
    assert set(said.groups()) == calls, done.stderr


@pytest.mark.skipif(
    not is_open_mpi(), reason="MPICH's mpiexec ends such a job with status 0; mpicoll.run: launch/test_supervisor"
)
def test_a_rank_whose_process_has_ended_is_noticed_before_the_timeout() -> None:
    """Mostly the launcher is the first to notice it."""
    done = job("ends its process", timeout_s=1000)
    assert done.returncode != 0, done.stderr
    said = done.stdout + done.stderr
    assert re.search(r"Rank 1 has not come: its process \d+ has ended|improperly|BAD TERMINATION", said), said


def test_the_check_can_be_switched_off() -> None:
    """The ranks then wait until the timeout."""
    done = job("other collective", timeout_s=1, MPICOLL_CHECK="0")
    assert "the ranks call" not in done.stderr, done.stderr
    said = "no end after 1.* s. Every rank of this node has begun its collective 101 on this group; the calls may differ"
    assert re.search(said, done.stderr), done.stderr
