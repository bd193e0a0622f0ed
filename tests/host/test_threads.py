"""Ranks whose torch has several threads: which of them copy and reduce in the window, and which node has the memory."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mpicoll as dist
from mpicoll._algorithms import blocks, window
from mpicoll._algorithms.window import Window
from mpicoll._engine.communicator import Communicator
from mpicoll._engine.registry import registry
from mpicoll._mpi import shared_segment
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.shared_segment import Segment
from tests.support import agree

pytestmark = [pytest.mark.min_ranks(2), pytest.mark.one_node, pytest.mark.usefixtures("world")]
MIB = 1 << 20
SLOT = 4 * MIB  # bytes
NODES = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
needs_numa_maps = pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this kernel has no numa_maps")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, size: int) -> Iterator[Communicator]:
    """A group of ranks with two threads, for which there are cores, and with windows of its own from the first byte on."""
    assert registry._world is not None
    topology, agreed, ledger = registry._world
    everything = {name: dict.fromkeys(sizes, 1) for name, sizes in agreed.host.window_from.items()}
    choices = agreed.host._replace(window_from=everything)
    monkeypatch.setattr(
        registry, "_world", (topology._replace(threads=2, share=2, crowded=True), agreed._replace(host=choices), ledger)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    made = registry.create("threads", list(range(size)), 60)
    yield made
    torch.set_num_threads(threads)
    made.barrier()
    made.close()


def right(group: Communicator, count: int) -> bool:
    """Whether one operation of each kind is right, on tensors of ``count`` elements."""
    rank, size = group.rank, group.size
    total = size * (size + 1) / 2
    reduced, half = torch.full((count,), rank + 1.0), torch.full((count,), rank + 1.0, dtype=torch.bfloat16)
    sent, gathered, scattered = torch.full((count,), float(rank)), torch.zeros(size, count), torch.zeros(count)
    exchanged, own = torch.zeros(size, count), torch.arange(size * count, dtype=torch.float32).view(size, count) + rank
    group.all_reduce(reduced)
    group.all_reduce(half)
    group.broadcast(sent, 1)
    group.all_gather_single(gathered, torch.full((count,), rank + 1.0))
    group.reduce_scatter_single(scattered, own)
    group.all_to_all_single(exchanged, own)
    others = torch.arange(size, dtype=torch.float32).view(size, 1)
    first = torch.arange(count, dtype=torch.float32) + rank * count
    return (
        bool((reduced == total).all() and (half == total).all() and (sent == 1).all())
        and torch.equal(gathered, (others + 1).expand(size, count))
        and torch.equal(scattered, size * first + total - size)
        and torch.equal(exchanged, first + others)
    )


def copies(group: Communicator) -> object:
    made = group.host.windows.window
    assert isinstance(made, Window)
    return made.copy


@pytest.mark.parametrize("count", [100, MIB // 4 + 3])
def test_ranks_with_threads(group: Communicator, count: int) -> None:
    agree(right(group, count) and copies(group) is blocks.copy)
    chunk = group.host.windows.window.chunk  # type: ignore[union-attr]
    agree(chunk == registry._world[1].host.chunk(group.size, threads=2), chunk)  # type: ignore[index]


def test_a_rank_may_change_its_threads_later(group: Communicator) -> None:
    """All ranks still cut their tensors alike. More threads than its share of the cores do not copy."""
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads if group.rank == 0 else 2)
        found.append(
            right(group, MIB // 2 + 5) and copies(group) is (blocks.copy if torch.get_num_threads() == 2 else window.memmove)
        )
    agree(all(found), found)


def test_an_asynchronous_collective_copies_with_one_thread(group: Communicator) -> None:
    tensor = torch.full((MIB,), group.rank + 1.0)
    work = group.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    agree((tensor == group.size * (group.size + 1) / 2).all() and copies(group) is window.memmove)


def test_one_thread_copies_where_cores_are_few(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry._world is not None
    topology, agreed, ledger = registry._world
    monkeypatch.setattr(registry, "_world", (topology._replace(threads=1, share=2), agreed, ledger))
    made = registry.create("one thread", list(range(size)), 60)
    agree(right(made, MIB) and copies(made) is window.memmove)
    made.close()


def pages(segment: Segment) -> Counter[int]:
    """Number of pages of a segment that this rank has touched, by the NUMA node that has them."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    found = Counter[int]()
    for line in lines:
        if line.startswith(f"{segment.address:x} "):
            found.update({int(node): int(count) for node, count in re.findall(r"\bN(\d+)=(\d+)", line)})
    return found


def slot_written(cpu: int | None = None) -> tuple[Counter[int], Counter[int]]:
    """The pages that a rank has touched before and after it writes its slot, on this CPU."""
    comm, cpus = dist.get_comm(), os.sched_getaffinity(0)
    segment = shared_segment.create(comm, Window.nbytes(comm.size, SLOT))
    assert segment is not None
    made = Window(segment, comm.rank, comm.size, SLOT, lambda _: Backoff().pause, spins=10)
    os.sched_setaffinity(0, cpus if cpu is None else {cpu})
    before, source = pages(segment), torch.ones(SLOT, dtype=torch.uint8)
    made.copy(made.slot(0, comm.rank), source.data_ptr(), SLOT)
    after = pages(segment)
    os.sched_setaffinity(0, cpus)
    return before, after


@needs_numa_maps
def test_a_rank_is_the_first_to_touch_its_slot() -> None:
    """Making a window touches no slot: Linux would take all of them from the node of the rank that makes it."""
    before, after = slot_written()
    agree(before.total() <= 2 and after.total() > before.total(), (before, after))


@needs_numa_maps
@pytest.mark.skipif(NODES < 2, reason=f"{NODES} NUMA node here: all slots are on it")
def test_a_slot_is_on_the_node_of_its_rank(rank: int) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    cpu = cpus[0] if rank % 2 else cpus[-1]
    node = next(int(path.name[4:]) for path in Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*"))
    before, after = slot_written(cpu)
    written = after - before
    agree(written[node] >= 0.9 * written.total() > 0, (node, written))
