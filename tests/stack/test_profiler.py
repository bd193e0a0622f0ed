"""torch.profiler shows each MPI operation as an event, named and marked as Gloo's is, with its arguments beside it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import mpicoll
from mpicoll._engine import spans
from tests.stack.operations import operations, waited
from tests.support import agree, everyone

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
    pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning"),
]


def events(body: Callable[[], Any], backend: str = "mpi") -> list[Any]:
    """The events of a backend while ``body`` runs, in the order of their starts."""
    with torch.autograd.profiler.profile(record_shapes=True) as recorded:
        body()
    found = [event for event in recorded.function_events if event.name.startswith(f"{backend}:")]
    return sorted(found, key=lambda event: event.time_range.start)


def traced(path: Path, body: Callable[[], Any], name: str) -> list[dict[str, Any]]:
    """The events of a name in the trace file that the profiler writes, in the order of their starts."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        body()
    recorded.export_chrome_trace(str(path))
    found = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == name]
    return sorted(found, key=lambda event: float(event["ts"]))


def every_operation(async_op: bool, rank: int, size: int) -> dict[str, Callable[[Any], Any]]:
    found = {name: operation.call for name, operation in operations(rank, size, torch.ones, async_op).items()}
    if async_op:  # Gloo's Future is ready before the event has ended
        del found["all_reduce_coalesced"], found["all_gather_coalesced"]
    found["all_reduce sparse"] = lambda group: dist.all_reduce(torch.ones(4).to_sparse(), group=group, async_op=async_op)
    found["barrier"] = lambda group: dist.barrier(group=group, async_op=async_op)
    return found


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_events_are_as_gloos(async_op: bool, rank: int, size: int) -> None:
    """Name, count, shapes of the inputs, and that they are asynchronous: what programs and torch's own tests look at."""
    gloo: Any = dist.new_group(backend="gloo")
    wrong = {}
    for name in every_operation(async_op, rank, size):
        seen = []
        for group, backend in ((dist.group.WORLD, "mpi"), (gloo, "gloo")):
            call = every_operation(async_op, rank, size)[name]
            try:
                found = events(lambda call=call, group=group: waited(call(group)), backend)
            except RuntimeError as error:
                if "gloo does not support" not in str(error):  # all_to_all of lists, before torch 2.13
                    raise
                continue
            seen.append([(e.name.partition(":")[2], e.count, e.is_async, e.input_shapes) for e in found])
        if name.startswith("reduce_scatter"):  # Gloo makes it of all_reduce, of as many tensors as it likes
            shapes = [[4]] * size if name == "reduce_scatter" else [[4 * size]]
            seen = [seen[0], [("reduce_scatter", 1, True, shapes)]]
        if seen[0] != seen[-1]:
            wrong[name] = seen
    dist.destroy_process_group(gloo)
    agree(not wrong, f"mpi, gloo: {wrong}")


def test_what_torch_does_not_have_is_shown_too() -> None:
    """get_comm had no title, and raised KeyError while a profiler recorded."""
    group = mpicoll.new_group()

    def body() -> None:
        mpicoll.scan(torch.ones(4), group=group)
        mpicoll.exscan(torch.ones(4), group=group)
        mpicoll.get_comm(group)

    names = [event.name for event in events(body)]
    mpicoll.destroy_process_group(group)
    agree(names == ["mpi:scan", "mpi:exscan", "mpi:get_comm"], names)


@pytest.mark.parametrize("library", [mpicoll, dist], ids=["mpicoll", "torch.distributed"])
def test_arguments_are_in_the_trace(library: Any, tmp_path: Path, rank: int, size: int) -> None:
    """Operation, group, sequence number, dtype and bytes, of blocking and asynchronous operations and of messages."""
    group = dist.new_group(list(range(size)))

    def body() -> None:
        library.all_reduce(torch.ones(256), group=group)
        work = library.broadcast(torch.ones(8, dtype=torch.bfloat16), 0, group=group, async_op=True)
        library.all_gather([torch.empty(4) for _ in range(size)], torch.ones(4), group=group)
        work.wait()
        works = [library.irecv(torch.empty(6), (rank - 1) % size, group), library.isend(torch.ones(6), (rank + 1) % size, group)]
        for work in works:
            work.wait()
        library.barrier(group)

    found = [event["args"] for event in traced(tmp_path / "trace.json", body, spans.ARGUMENTS)]
    keys = ("Collective name", "dtype", "In msg nelems", "In msg bytes", "Seq", "Group size", "Process Group Name")
    shared = (size, group.group_name)
    expected = [
        ("all_reduce", "float32", 256, 1024, 1, *shared),
        ("broadcast", "bfloat16", 8, 16, 2, *shared),
        ("all_gather", "float32", 4, 16, 3, *shared),
        ("irecv", "float32", 6, 24, None, *shared),
        ("isend", "float32", 6, 24, None, *shared),
        ("barrier", None, 0, 0, 4, *shared),  # torch leaves out an empty text
    ]
    dist.destroy_process_group(group)
    agree([tuple(arguments.get(key) for key in keys) for arguments in found] == expected, found)
    numbers = everyone([arguments["Comms Id"] for arguments in found if "Seq" in arguments])
    agree(len({*numbers[0]}) == 4 and numbers == [numbers[0]] * size, numbers)
    agree(all(arguments["Process Group Ranks"] == str(list(range(size))) for arguments in found), found)


def test_an_asynchronous_event_lasts_until_completion(rank: int, size: int) -> None:
    """Else overlap with computation could not be seen. Nobody completes before rank 0 has come, which takes its time."""
    times: list[float] = []

    def body() -> None:
        if rank == 0:
            time.sleep(0.1)
        times.append(time.time())
        work: Any = dist.all_reduce(torch.ones(1 << 10), async_op=True)
        times.append(time.time())
        work.wait()

    (found,) = events(body)
    before_rank_0, after_mine = everyone(times)[0][0], times[1]
    waited_us = (before_rank_0 - after_mine) * 1e6
    agree(found.is_async and found.time_range.elapsed_us() > waited_us - 1000, (found, waited_us))


def test_an_event_that_outlives_the_profiler(rank: int, size: int) -> None:
    """It ends with the profiler: torch frees its events then, and a later end would write into memory that others have."""
    works: list[Any] = []

    def body() -> None:
        if rank > 0:
            works.append(dist.irecv(torch.empty(64), rank - 1))
        works.append(dist.all_reduce(torch.ones(1 << 20), async_op=True))

    for _ in range(3):
        found = events(body)
        if rank < size - 1:
            dist.send(torch.ones(64), rank + 1)
        for work in works:
            work.wait()
        agree([e.name for e in found] == (["mpi:recv"] if rank > 0 else []) + ["mpi:all_reduce"], found)
        works.clear()


def test_what_ddp_starts_from_c(rank: int, size: int) -> None:
    """The reducer's buckets do not pass through Python's functions; torch's own test expects one all_reduce per iteration."""
    model = DistributedDataParallel(torch.nn.Linear(10, 10, bias=False))

    def body() -> None:
        for _ in range(6):
            model(torch.ones(3, 10)).sum().backward()

    found = events(body)
    reduced = [event for event in found if event.name == "mpi:all_reduce"]
    rebuilt = [event for event in found if event.name == "mpi:broadcast"]
    shapes = {str(event.input_shapes) for event in reduced}
    right = len(reduced) == 6 and len(rebuilt) >= 1 and all(event.is_async for event in found) and shapes == {"[[100]]"}
    agree(right, found)


def test_a_failing_operation_ends_its_event(rank: int, size: int) -> None:
    """An event left open would swallow all that follows in the trace."""

    def body() -> None:
        with pytest.raises(ValueError, match="tag"):
            mpicoll.isend(torch.ones(2), rank, tag=-1)
        mpicoll.barrier()

    found = events(body)
    agree([e.name for e in found] == ["mpi:send", "mpi:barrier"] and not spans._events.open, found)


def test_no_profiler_no_event(rank: int, size: int) -> None:
    """Off, it must cost nothing: no Future is made for it."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    agree(work._future is None and not spans._events.open)
