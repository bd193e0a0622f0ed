"""Every way to wait for another rank, and what that rank does instead of coming: TABLE says what happens, and makes the rows.

docs/guides/debugging.md has the same table. A few jobs run always, one for each cell at night.
"""

import json
import re
import time

import pytest

from tests.faults.clock import began, clock
from tests.support import ROOT, launch

__all__ = ["clock"]

pytestmark = [pytest.mark.launch, pytest.mark.timeout(150)]

SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "every_wait.py")
PAGE = ROOT / "docs" / "guides" / "debugging.md"
LIMIT_S = 4.0
END_S = 4.0  # for ranks to show where they are, and for mpiexec to end them
# What the other rank does instead, in words for the page, and the name of it in the script.
FAULTS = {
    "is late": "late",
    "has ended its program": "ended",
    "has left the group": "left",
    "is stopped": "stopped",
    "is killed": "killed",
}

# What happens, in words for the page.
PASSES = "it ends when the other comes; a line on stderr after 3 s"
QUIET = "it ends when the other comes"
JOB = "the job ends within 2 s"
JOB_AT_LIMIT = "the job ends at the limit"
RAISES = "`OperationTimeout` within 2 s"
RAISES_LATER = "`OperationTimeout` after 3 s"
AT_LIMIT = "`OperationTimeout` at the limit"
KILLED = "the job ends within a second"
SEES_THE_DEATH = "Where the other is killed, an `OperationTimeout` may be raised just before the job ends.\n"
SAYS = "it returns within 2 s, and stderr says why"
SAYS_AT_LIMIT = "it returns at the limit, and stderr says why"
WAITS = "it waits; a line on stderr after 8 s"
NOTHING = "nothing"
ANSWERED = "it returns: a thread of the worker answers"
WORKER_LEFT = "`WorkerLeft` at once"
CALL_AT_LIMIT = "`RuntimeError` at its `rpc_timeout`"
KEY_AT_LIMIT = "`DistStoreError` at the limit of the store"
KEY_GONE = "`DistStoreError` within a second"
MOVED = "it returns: a thread of the other moves the data"

RAISED = {WORKER_LEFT: "WorkerLeft", CALL_AT_LIMIT: "CallTimedOut", KEY_AT_LIMIT: "DistStoreError", KEY_GONE: "DistStoreError"}

# A row: what waits, in words; the ways of the script; what happens for each of FAULTS.
TABLE: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    (
        "a blocking collective",
        ("all_reduce", "all_reduce of mpicoll", "all_reduce, large", "broadcast", "all_gather_object"),
        (PASSES, JOB, JOB, JOB_AT_LIMIT, KILLED),
    ),
    (
        "`barrier`, `monitored_barrier`, `fence`",
        ("barrier", "monitored_barrier", "fence"),
        (PASSES, JOB, JOB, AT_LIMIT, KILLED),
    ),
    (
        "an asynchronous collective: `wait()`, its Future, `then`, `wait_all`, `wait_tensor`; DDP's backward, with a hook too",
        ("wait", "future", "then", "wait_all", "wait_tensor", "ddp", "ddp, no_sync", "ddp, hook"),
        (PASSES, RAISES, RAISES, AT_LIMIT, KILLED),
    ),
    (
        "`isend`, `irecv`, `batch_isend_irecv`; `send`, `recv` and those of objects of torch.distributed; `wait_signal`",
        (
            "recv", "recv from any", "recv_object_list", "irecv", "irecv, then", "send, large", "isend, large",
            "batch_isend_irecv", "wait_signal",
        ),
        (PASSES, RAISES, RAISES, AT_LIMIT, KILLED),
    ),
    (
        "`mpicoll.send`, `mpicoll.recv`",
        ("recv of mpicoll", "recv from any of mpicoll", "send of mpicoll, large"),
        (PASSES, JOB, JOB, JOB_AT_LIMIT, KILLED),
    ),
    (
        "`put`, `get`, `accumulate` of a tensor that is not of `empty_shared`",
        ("put", "get", "accumulate"),
        (MOVED, MOVED, MOVED, JOB_AT_LIMIT, KILLED),
    ),
    ("`wait()` of such a small `put`", ("put, wait",), (MOVED, MOVED, MOVED, AT_LIMIT, KILLED)),
    ("`new_group`", ("new_group",), (PASSES, RAISES_LATER, RAISES_LATER, AT_LIMIT, KILLED)),
    ("`destroy_process_group` with an operation under way", ("destroy",), (PASSES, SAYS, SAYS, SAYS_AT_LIMIT, KILLED)),
    ("`rpc_sync`, `rpc_async`", ("rpc_sync",), (ANSWERED, WORKER_LEFT, ANSWERED, CALL_AT_LIMIT, KILLED)),
    ("a key of the store over MPI", ("store",), (QUIET, KEY_AT_LIMIT, KEY_GONE, KEY_AT_LIMIT, KILLED)),
    ("the end of the program", ("exit",), (QUIET, NOTHING, WAITS, WAITS, KILLED)),
]  # fmt: skip

WORDS = {
    "has ended its program": r"[Rr]ank 1[ ,].*program has ended|rank 1 cannot come: its program has ended",
    "has left the group": r"[Rr]ank 1 .*has destroyed (this|the|its default) group|rank 0 has destroyed the process group",
    "is stopped": r"rank 1 did not come|[Rr]ank 1\b.*is stopped \(SIGSTOP\)",
}
ALWAYS = {
    ("ddp", "is stopped"),
    ("then", "has left the group"),
    ("recv", "has ended its program"),
    ("destroy", "is stopped"),
    ("fence", "has left the group"),
    ("new_group", "has left the group"),
    ("wait_signal", "is stopped"),
}
CASES = [
    pytest.param(way, fault, outcome, id=f"{way}-{fault}", marks=[] if (way, fault) in ALWAYS else pytest.mark.slow)
    for _, ways, outcomes in TABLE
    for way in ways
    for fault, outcome in zip(FAULTS, outcomes, strict=True)
]


@pytest.mark.parametrize(("way", "fault", "outcome"), CASES)
def test_cell(way: str, fault: str, outcome: str, clock: dict[str, str]) -> None:
    check(way, fault, outcome, clock)


@pytest.mark.parametrize("fault", ["has left the group", pytest.param("is late", marks=pytest.mark.slow)])
def test_new_group_with_a_rank_of_another_node(fault: str, clock: dict[str, str]) -> None:
    """The waiting rank named the other one after 3 s, but raised at the limit: it cannot read that rank's board."""
    outcome = RAISES_LATER if fault == "has left the group" else PASSES
    check("new_group", fault, outcome, clock, _MPICOLL_NODE_SIZE="1")


def check(way: str, fault: str, outcome: str, clock: dict[str, str], **environ: str) -> None:
    limit_s, late_s = (LIMIT_S, 1.5) if clock else (2 * LIMIT_S, 4.5)
    done = launch(2, SCRIPT, way, FAULTS[fault], str(limit_s), str(late_s), timeout_s=90, env={**clock, **environ})
    took = time.time() - began(done.stdout)
    found = re.search(r'\{"came".*\}', done.stdout)
    said = json.loads(found[0]) if found else {"came": "", "words": "", "after_s": 0.0}
    everything = f"{way}, {fault}: after {took:.1f} s, status {done.returncode}\n{done.stdout}{done.stderr}"
    if outcome in (PASSES, QUIET, SAYS, SAYS_AT_LIMIT, WAITS, NOTHING, ANSWERED, MOVED):
        assert said["came"] == "passed", everything
    elif outcome in (RAISES, RAISES_LATER, AT_LIMIT):
        assert "OperationTimeout" in said["came"] + said["words"], everything
    elif outcome in RAISED:
        assert said["came"] == RAISED[outcome], everything
    else:
        # mpiexec ends the job. A rank may see the death before that, if its thread can be interrupted: SEES_THE_DEATH.
        raised = "OperationTimeout" in said["came"] + said["words"] and re.search(r"its process \d+ has ended", said["words"])
        assert not found or way == "exit" or (outcome == KILLED and (raised or way == "destroy")), everything
        assert done.returncode != 0, everything
        assert took < limit_s * (outcome == JOB_AT_LIMIT) + 2 + END_S, everything
    least = {PASSES: late_s, AT_LIMIT: limit_s, SAYS_AT_LIMIT: limit_s, CALL_AT_LIMIT: limit_s, KEY_AT_LIMIT: limit_s}.get(
        outcome, 0.0
    )
    least = late_s if outcome == QUIET and way == "store" else least
    if found and way != "exit":
        assert max(0.0, least - 0.5) <= said["after_s"] <= max(least, 3.0 * (outcome == RAISES_LATER)) + 2, everything
    if (
        fault in WORDS
        and outcome not in (NOTHING, ANSWERED, MOVED, WORKER_LEFT, KEY_AT_LIMIT)
        and (way, fault) != ("exit", "has left the group")
    ):
        assert re.search(WORDS[fault], done.stdout + done.stderr), everything
    if outcome in (PASSES, WAITS):
        assert re.search(r"has waited for \d+ s|has come to the end of its program and waits for rank 1", done.stderr), everything


@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_the_start_of_a_large_put_has_the_limit(clock: dict[str, str], level: str) -> None:
    """Open MPI's MPI_Rput waits for the other rank, outside of what the watchdog saw: it hung. MPICH's returns.

    At MPI_THREAD_SERIALIZED it waits under the lock, for which the watchdog waited, too: nobody named the other rank.
    """
    env = {**clock, "MPI4PY_RC_THREAD_LEVEL": level}
    done = launch(2, SCRIPT, "put, large", "stopped", str(LIMIT_S), "1.5", timeout_s=90, env=env)
    took = time.time() - began(done.stdout)
    assert re.search(r"put on group '0' \(rank 0 of 2\): (no end after 4|Timed out)", done.stdout + done.stderr), done
    assert re.search(WORDS["is stopped"], done.stdout + done.stderr), done
    assert took < LIMIT_S + 2 + END_S, done


def test_the_page_has_the_table() -> None:
    head = f"| waits in | the other {' | the other '.join(FAULTS)} |\n|{'---|' * (len(FAULTS) + 1)}\n"
    rows = "".join(f"| {label} | {' | '.join(outcomes)} |\n" for label, _, outcomes in TABLE)
    page = PAGE.read_text()
    assert head + rows in page, f"{PAGE} must have this table:\n{head}{rows}"
    assert SEES_THE_DEATH in page
