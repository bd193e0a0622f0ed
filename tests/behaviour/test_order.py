"""One order per group, none between groups: what is started first is carried out first, and nothing else is assumed."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import distributed_c10d

import mpicoll as dist
from mpicoll._engine.registry import registry
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")

PATIENCE_S = 40.0


def total(size: int) -> float:
    return size * (size + 1) / 2


@pytest.fixture
def two_groups(world: Any, size: int) -> Iterator[tuple[Any, Any]]:
    groups = dist.new_group(range(size)), dist.new_group(range(size))
    yield groups
    for group in groups:
        dist.destroy_process_group(group)


def in_threads(*functions: Callable[[], None]) -> list[BaseException]:
    """Runs the functions in a thread each and returns what they raised; a thread that does not end is an error too."""
    raised: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  shown by the test
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        if thread.is_alive():
            raised.append(TimeoutError(f"{thread.name} has not ended"))
    return raised


def test_a_sync_call_waits_for_what_was_started_before_it(rank: int, size: int) -> None:  # trap 71
    first = torch.full((1 << 20,), rank + 1.0)
    for _ in range(5):
        tensor = first.clone()
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
        dist.broadcast(tensor, src=size - 1)  # a different operation: overtaking would hang, or send the wrong values
        agree(all(work.is_completed() for work in works) and torch.all(tensor == total(size) * size**2), f"{tensor[:3]}")


@pytest.mark.parametrize("async_barrier", [False, True])
def test_barrier_keeps_its_place(async_barrier: bool, rank: int, size: int) -> None:
    tensor = torch.full((1000,), rank + 1.0)
    before = dist.all_reduce(tensor, async_op=True)
    work = dist.barrier(async_op=async_barrier)
    if work is not None:
        work.wait()
    agree(before.is_completed() and torch.all(tensor == total(size)), f"{before}")


@pytest.mark.parametrize("by_torch", [False, True], ids=["reduced by MPI", "reduced by torch"])
def test_opposite_orders_on_two_groups_do_not_deadlock(by_torch: bool, two_groups: tuple[Any, Any], rank: int, size: int) -> None:
    """trap 72"""
    kind = torch.bfloat16 if by_torch else torch.float32
    for _ in range(10):
        tensors = [torch.full((1 << 18,), rank + 1.0 + i, dtype=kind)[:: 1 + by_torch] for i in range(2)]
        works = [dist.all_reduce(tensors[i], group=two_groups[i], async_op=True) for i in ((0, 1) if rank % 2 == 0 else (1, 0))]
        for work in reversed(works):
            work.wait()
        agree(torch.all(tensors[0] == total(size)) and torch.all(tensors[1] == total(size) + size))


def test_two_threads_on_two_groups(two_groups: tuple[Any, Any], rank: int, size: int) -> None:
    sums: dict[int, Tensor] = {}

    def loop(index: int) -> None:
        tensor = torch.full((100,), float(rank))
        for _ in range(100):
            tensor.fill_(rank + index)
            dist.all_reduce(tensor, group=two_groups[index])
        sums[index] = tensor

    raised = in_threads(lambda: loop(0), lambda: loop(1))
    agree(not raised, f"{raised}")
    agree(all(torch.all(sums[i] == sum(r + i for r in range(size))) for i in range(2)), f"{sums}")


@pytest.mark.parametrize("blocking", [False, pytest.param(True, marks=pytest.mark.min_ranks(2))])
def test_a_receive_and_a_collective_do_not_share_a_lock(blocking: bool, rank: int, size: int) -> None:  # trap 73
    tensor, reduced, source = torch.zeros(3), torch.full((3,), rank + 1.0), (rank - 1) % size
    work = None if blocking else dist.irecv(tensor, source, tag=3)
    done: list[bool] = []

    def receive() -> None:
        done.append(dist.recv(tensor, source, tag=3) == source if work is None else work.wait())

    def others() -> None:
        for _ in range(20):
            dist.all_reduce(reduced.fill_(rank + 1.0))
            dist.all_reduce(reduced.fill_(rank + 1.0), async_op=True).wait()
        dist.isend(torch.full((3,), float(rank)), (rank + 1) % size, tag=3).wait()  # only now can the receive end
        done.append(True)

    raised = in_threads(receive, others)
    agree(not raised and done == [True, True], f"{raised} {done}")
    agree(tensor[0] == source and reduced[0] == total(size), f"{tensor} {reduced}")


def test_threads_that_take_turns_share_a_group(rank: int, size: int) -> None:
    """Their operations are alike, so that it does not matter whose turn it is on which rank."""
    turn = threading.Lock()

    def reduce() -> None:
        for _ in range(25):
            with turn:
                dist.all_reduce(torch.full((8,), 1.0))

    raised = in_threads(*[reduce] * 4)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    agree(not raised and tensor.item() == size, f"{raised} {tensor}")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("api", [dist, torch.distributed], ids=["mpicoll", "torch"])
@pytest.mark.parametrize("queued", [False, True], ids=["inside", "queued"])
def test_a_second_thread_in_a_group_is_told_so(
    world: Any, api: Any, queued: bool, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint beside training, say: all_gather met all_reduce, and the job hung, or had wrong data."""
    group = registry.find(distributed_c10d._world.pg_names[distributed_c10d._get_default_group()])

    def record(entry: Any) -> None:
        time.sleep(0.02)  # the second thread comes between the first one's turn and its entry
        group.history.append(entry)

    monkeypatch.setattr(group.line, "_record", record)
    late, first, second = rank == size - 1, torch.ones(8), torch.ones(1)
    works = [dist.broadcast(torch.ones(1), src=size - 1, async_op=True)] if queued and not late else []
    training = threading.Thread(target=lambda: api.all_reduce(first), daemon=True)
    error: Exception | None = None
    if not late:  # the last rank does not come before all others have been refused
        training.start()
        while not (group._waiting_calls if queued else group.line.running.locked()):
            time.sleep(0.001)
        try:
            api.broadcast(second, src=0)
        except dist.ConcurrentCollectives as refusal:
            error = refusal
    agree(
        late
        or re.search("broadcast on group .*: another thread of this rank is in all_reduce on the same .* new_group", str(error))
    )
    if late:
        works = [dist.broadcast(torch.ones(1), src=size - 1, async_op=True)] if queued else []
        training.start()
    for work in works:
        work.wait()
    training.join(PATIENCE_S)
    api.broadcast(second, src=0)
    agree(torch.all(first == size), f"{first}")
