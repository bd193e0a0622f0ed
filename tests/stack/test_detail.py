"""torch's debugging aids over MPI: TORCH_DISTRIBUTED_DEBUG, its check for mismatches, NaN check, flight recorder, timeouts."""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DebugLevel
from torch.distributed.tensor import init_device_mesh

import mpicoll
from mpicoll._c10d.names import BACKEND_SUBCLASSES
from tests.stack import sharded
from tests.stack.exercise import exercise, total
from tests.support import agree, everyone, launch

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning"),
]
# torch <= 2.13 has no wrapper for a group that is written in Python
wrapped = pytest.mark.skipif(not BACKEND_SUBCLASSES, reason="needs torch >= 2.14")
NATIVE: Any = torch._C._distributed_c10d


@pytest.fixture
def level(request: pytest.FixtureRequest, no_world: None) -> DebugLevel:
    """A world made at this level, as TORCH_DISTRIBUTED_DEBUG would have it."""
    dist.set_debug_level(request.param)
    dist.init_process_group("mpi")
    return request.param  # type: ignore[no-any-return]


levels = pytest.mark.parametrize("level", [DebugLevel.INFO, DebugLevel.DETAIL], indirect=True, ids=lambda level: level.name)
in_detail = pytest.mark.parametrize("level", [DebugLevel.DETAIL], indirect=True, ids=["DETAIL"])


@levels
def test_everything_works(level: DebugLevel, rank: int, size: int) -> None:
    """Collectives, messages, objects, subgroups, Gloo beside, both doors, training: the same answers as without it."""
    wrong = exercise(dist.group.WORLD, rank, size)
    pair: Any = dist.new_group(list(range((size + 1) // 2)))
    if rank < (size + 1) // 2:
        wrong += exercise(pair, rank, (size + 1) // 2)
    gloo = dist.new_group(backend="gloo")
    wrong += ["gloo"] * (total(gloo) != size) + ["world"] * (total() != size)
    mpicoll.all_reduce(mine := torch.ones(3))
    wrong += ["mpicoll.all_reduce"] * (mine.tolist() != [size] * 3)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
    wrong += ["asynchronous"] * (not all(work.wait() and work.is_completed() for work in works))  # type: ignore[union-attr]
    mesh, reference = init_device_mesh("cpu", (size,)), sharded.alone(2, size)
    for model in (sharded.ddp(sharded.network()), sharded.sharded(sharded.network(), mesh=mesh)):
        sharded.train(model, sharded.sgd(model.parameters()), range(2), rank, size)
        wrong += sharded.differences(model.parameters(), reference.parameters())
    agree(not wrong and dist.get_debug_level() == level, wrong)


def said_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


MISMATCHES: dict[str, Callable[[int], Any]] = {
    "operation": lambda rank: dist.all_reduce(torch.ones(3)) if rank == 0 else dist.broadcast(torch.ones(3), 0),
    "shape": lambda rank: dist.all_reduce(torch.ones(2 + (rank == 0))),
    "dtype": lambda rank: dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank == 0 else torch.float32)),
    "async": lambda rank: dist.all_reduce(torch.ones(2), async_op=True) if rank == 0 else dist.barrier(),
}


@wrapped
@pytest.mark.min_ranks(2)
@in_detail
@pytest.mark.parametrize("what", list(MISMATCHES))
def test_mismatches(what: str, level: DebugLevel, rank: int, size: int) -> None:
    """torch's own words on every rank, before anything reaches MPI, so that the group works afterwards."""
    said = said_by(lambda: MISMATCHES[what](rank))
    ours = "OpType=ALLREDUCE" in said or rank != 0  # torch reads a fingerprint of another length as noise, on Gloo, too
    agree("Detected mismatch between collectives on ranks" in said and ours, said)
    agree(not exercise(dist.group.WORLD, rank, size))


@wrapped
@pytest.mark.min_ranks(2)
@in_detail
def test_missing_ranks(level: DebugLevel, rank: int, size: int) -> None:
    """By rank 0, in the group's timeout; MPI is not waiting in that group, and the others go on."""
    group: Any = dist.new_group(timeout=timedelta(seconds=1))
    said = said_by(lambda: dist.all_reduce(torch.ones(1), group=group)) if rank != 1 else ""
    named = "Ranks 1 failed to pass monitoredBarrier" in said
    agree(named == (rank == 0) and total() == size, said)


def test_barrier_after_init(no_world: None, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """trap 49: the world's barrier, and those of groups of both backends, go through the store."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    dist.init_process_group("mpi")
    groups = [dist.new_group(backend=backend) for backend in ("mpi", "gloo")]
    agree(total() == size and all(total(group) == size for group in groups))


@wrapped
def test_nan_check(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN on its way into MPI raises, on the rank that has it, before a byte moves."""
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    group: Any = dist.new_group()
    bad = torch.tensor([1.0, float("nan")])
    said = [said_by(call) for call in (lambda: dist.all_reduce(bad, group=group), lambda: group.allreduce([bad]))]
    agree("NaN found" in said[0] and "NaN found" in said[1] and not exercise(group, rank, size), said)


@pytest.mark.skipif(not hasattr(NATIVE, "_reset_fr_trace"), reason="needs torch >= 2.15")
def test_flight_recorder(rank: int, size: int) -> None:
    """A dump of a program that works has no operation that looks as if it were under way, synchronous ones included."""
    NATIVE._reset_fr_trace(backend="mpi")
    group: Any = dist.new_group(group_desc="recorded")
    dist.all_reduce(torch.ones(4, 2), group=group)
    dist.broadcast(torch.ones(3, dtype=torch.float64), 0, group=group)
    dist.all_gather([torch.zeros(2) for _ in range(size)], torch.ones(2), group=group)
    dist.all_reduce(torch.ones(5), group=group, async_op=True).wait()  # type: ignore[union-attr]
    dist.barrier(group=group)
    found = json.loads(NATIVE._dump_fr_trace_json(backend="mpi"))["entries"]
    mine = [entry for entry in found if entry["process_group"][1] == "recorded"]
    names = [entry["profiling_name"] for entry in mine]
    calls = ["mpi:all_reduce", "mpi:broadcast", "mpi:all_gather", "mpi:all_reduce", "mpi:barrier"]
    agree(names == calls and mine[0]["input_sizes"] == [[4, 2]] and mine[1]["input_dtypes"] == ["Double"], mine)
    agree(all(entry["retired"] for entry in mine), mine)


@pytest.mark.skipif(not hasattr(dist, "set_timeout"), reason="needs torch >= 2.14")
@pytest.mark.min_ranks(2)
def test_set_timeout(rank: int, size: int) -> None:
    """torch's own words are that MPI cannot: here it counts from the next operation on."""
    group: Any = dist.new_group()
    dist.set_timeout(timedelta(seconds=0.5), group)
    tensor, said = torch.ones(1), ""
    if rank == 0:
        work: Any = dist.all_reduce(tensor, group=group, async_op=True)
        said = said_by(work.wait)
    everyone(None)
    if rank != 0:
        dist.all_reduce(tensor, group=group)  # rank 0's, left in MPI, takes part
    agree(("no end within the timeout of 0.5 s" in said) == (rank == 0) and total() == size, said)


@pytest.mark.launch
@pytest.mark.timeout(90)
def test_a_job_in_detail() -> None:
    """A script that trains, with all of torch's debugging variables on: it works, ends well, and torch's own log is there."""
    variables = {
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_DIST_INIT_BARRIER": "1",
    }
    done = launch(2, "tests/c10d/scripts/train_ddp.py", timeout_s=70, env=variables)
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    assert done.stdout.count("of 2: trained") == 2, said
    assert "Traceback" not in done.stderr, said
    assert "DDP Initialized with" in done.stderr, said
    assert os.environ.get("TORCH_DISTRIBUTED_DEBUG") is None
