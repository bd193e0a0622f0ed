"""torch.profiler shows each MPI operation as a span that names bytes, dtype and group, whichever door it came by."""

from __future__ import annotations

import json
import re
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
from tests.support import agree, everyone

SECTION = "Mixed backends and debugging"
SPAN = re.compile(r"mpi::(\w+)\((?:([\w ]+), )?(\d+) bytes, group ([^,)]+)(, async)?\)")

pytestmark = [
    pytest.mark.feature("torch.profiler: a span for each operation with bytes, dtype, group"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]


def spans(path: Path, body: Callable[[], Any]) -> list[dict[str, Any]]:
    """The spans of ``body`` in the order of their starts, read from the trace that the profiler writes."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        body()
    recorded.export_chrome_trace(str(path))
    found = []
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    for event in sorted(events, key=lambda event: event["ts"]):
        if match := SPAN.fullmatch(event["name"]):
            operation, dtype, nbytes, group, is_async = match.groups()
            named = {"operation": operation, "dtype": dtype, "bytes": int(nbytes), "group": group, "async": bool(is_async)}
            found.append({**named, "start": event["ts"], "end": event["ts"] + event["dur"]})
    return found


def named(found: list[dict[str, Any]]) -> list[tuple[str, str, int, str, bool]]:
    return [(s["operation"], s["dtype"], s["bytes"], s["group"], s["async"]) for s in found]


@pytest.mark.parametrize("door", [mpicoll, dist], ids=["mpicoll", "torch.distributed"])
def test_each_operation_is_a_span(door: Any, tmp_path: Path, rank: int, size: int) -> None:
    """Blocking ones, messages, and operations without tensors, with what each moved."""
    world = dist.group.WORLD.group_name
    x = torch.ones(256)

    def body() -> None:
        door.all_reduce(x)
        door.broadcast(x.to(torch.bfloat16), 0)
        door.all_gather([torch.empty(4, dtype=torch.int64) for _ in range(size)], torch.ones(4, dtype=torch.int64))
        door.gather(x, [torch.empty(256) for _ in range(size)] if rank == 0 else None, dst=0)
        works = [door.irecv(torch.empty(256), (rank - 1) % size), door.isend(x, (rank + 1) % size)]
        for work in works:
            work.wait()
        door.barrier()

    found = named(spans(tmp_path / "trace.json", body))
    expected = [
        ("all_reduce", "float32", 1024, world, False),
        ("broadcast", "bfloat16", 512, world, False),
        ("all_gather", "int64", 32 * size, world, False),
        ("gather", "float32", 1024 * (size if rank == 0 else 1), world, False),
        ("irecv", "float32", 1024, world, True),
        ("isend", "float32", 1024, world, True),
        ("barrier", None, 0, world, False),
    ]
    agree(found == expected, found)


def test_an_asynchronous_span_lasts_until_completion(tmp_path: Path, rank: int, size: int) -> None:
    """Else overlap with computation could not be seen. Nobody completes before rank 0 has come, which takes its time."""
    times: list[float] = []

    def body() -> None:
        if rank == 0:
            time.sleep(0.1)
        times.append(time.time())
        work: Any = dist.all_reduce(torch.ones(1 << 10), async_op=True)
        times.append(time.time())
        work.wait()

    (found,) = spans(tmp_path / "trace.json", body)
    before_rank_0, after_mine = everyone(times)[0][0], times[1]
    waited_us = (before_rank_0 - after_mine) * 1e6
    agree(found["async"] and found["end"] - found["start"] > waited_us - 1000, (found, waited_us))


def test_a_span_that_outlives_the_profiler(tmp_path: Path, rank: int, size: int) -> None:
    """It ends with the profiler: torch frees its events then, and a later end would write into memory that others have."""
    works: list[Any] = []

    def body() -> None:
        if rank > 0:
            works.append(dist.irecv(torch.empty(64), rank - 1))
        works.append(dist.all_reduce(torch.ones(1 << 20), async_op=True))

    for _ in range(3):
        found = spans(tmp_path / "trace.json", body)
        if rank < size - 1:
            dist.send(torch.ones(64), rank + 1)
        for work in works:
            work.wait()
        agree([s["operation"] for s in found] == (["irecv"] if rank > 0 else []) + ["all_reduce"], found)
        works.clear()


def test_a_group_of_ones_own_is_named(tmp_path: Path, rank: int, size: int) -> None:
    """Two groups in one trace can be told apart, and a second span does not carry the first group's name."""
    group = dist.new_group(list(range(size)))
    found = named(spans(tmp_path / "trace.json", lambda: (dist.all_reduce(torch.ones(2), group=group), dist.barrier())))
    expected = [("all_reduce", "float32", 8, group.group_name, False), ("barrier", None, 0, dist.group.WORLD.group_name, False)]
    dist.destroy_process_group(group)
    agree(found == expected and group.group_name != dist.group.WORLD.group_name, found)


def test_what_ddp_starts_from_c(tmp_path: Path, rank: int, size: int) -> None:
    """The reducer's buckets do not pass through Python's functions; the engine still names them."""
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    found = named(spans(tmp_path / "trace.json", lambda: model(torch.ones(2, 8)).sum().backward()))
    agree(("all_reduce", "float32", 4 * 72, dist.group.WORLD.group_name, True) in found, found)


def test_a_failing_operation_closes_its_span(tmp_path: Path, rank: int, size: int) -> None:
    """A span left open would swallow all that follows in the trace."""

    def body() -> None:
        with pytest.raises(ValueError, match="rank"):
            mpicoll.isend(torch.ones(2), size + 3)
        with torch.no_grad():
            mpicoll.barrier()

    found = spans(tmp_path / "trace.json", body)
    agree(found[-1]["operation"] == "barrier", found)


def test_no_profiler_no_span(rank: int, size: int) -> None:
    """Off, it must cost nothing: no Future is made for it."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    agree(work._future is None)
