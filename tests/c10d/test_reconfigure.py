"""reconfigure where all ranks live. Dead ranks: tests/faults/test_fault_tolerant.py."""

import itertools
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

import mpicoll
from mpicoll._mpi import runtime
from tests.support import agree, everyone

pytestmark = [pytest.mark.usefixtures("no_world"), pytest.mark.min_ranks(2)]
LIMIT = timedelta(seconds=30)
uuids = itertools.count(1000)  # alike on all ranks


class Mpicoll:
    def init(self) -> None:
        mpicoll.init_process_group(timeout=LIMIT)

    def handle(self) -> str:
        return mpicoll.get_reconfigure_handle()

    def reconfigure(self, uuid: int, handles: Any, timeout: timedelta | None = None) -> Any:
        group = mpicoll.reconfigure(uuid, handles, timeout)
        assert group is torch.distributed.group.WORLD
        return group


@pytest.fixture
def door() -> Mpicoll:
    made = Mpicoll()
    made.init()
    return made


def works(group: Any, rank: int, size: int) -> bool:
    """Whether rank and size are these everywhere, and collectives, messages and a new group work."""
    dist = torch.distributed
    told = [(each.get_rank(), each.get_world_size()) for each in (dist, mpicoll)] + [(group.rank(), group.size())]
    total, copy, received = torch.full((4,), rank + 1.0), torch.full((2,), rank + 40.0), torch.zeros(1)
    dist.all_reduce(total)
    dist.broadcast(copy, src=0)
    sent = mpicoll.isend(torch.tensor([float(rank)]), (rank + 1) % size) if size > 1 else None
    if sent is not None:
        mpicoll.recv(received, (rank - 1) % size)
        sent.wait()
    pair = dist.new_group(sorted({0, size - 1}))
    if rank in (0, size - 1):
        mpicoll.all_reduce(total, group=pair)
    expected = size * (size + 1) / 2 * (min(size, 2) if rank in (0, size - 1) else 1)
    return (
        told == [(rank, size)] * 3
        and total.tolist() == [expected] * 4
        and copy.tolist() == [40.0] * 2
        and (size == 1 or received.item() == (rank - 1) % size)
        and dist.get_process_group_ranks(group) == list(range(size))
    )


Steps = Iterable[list[list[int]]]  # of each step: the ranks of MPI.COMM_WORLD of each new group, which have none in common

STEPS: dict[str, Callable[[list[int]], Steps]] = {
    "once": lambda all_: [[all_]],
    "twice alike": lambda all_: [[all_], [all_]],
    "without the last": lambda all_: [[all_], [all_[:-1]]],
    "without a middle one": lambda all_: [[all_], [all_[:1] + all_[2:]]],
    "down, up, down": lambda all_: [[[rank] for rank in all_], [all_], [[rank] for rank in all_]],
    "late ones": lambda all_: [[all_[:1]], [all_]],
    "merged": lambda all_: [[all_[: len(all_) // 2], all_[len(all_) // 2 :]], [all_]],
    "split": lambda all_: [[all_], [all_[: len(all_) // 2], all_[len(all_) // 2 :]]],
    "back again": lambda all_: [[all_], [all_[1:]], [all_]],
    "in another order": lambda all_: [[all_[::-1]], [all_[1:] + all_[:1]]],
    "others each time": lambda all_: [[all_[:index] + all_[index + 1 :]] for index in all_] + [[all_]],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_groups_of_other_ranks(steps: Callable[[list[int]], Steps], door: Mpicoll, rank: int, size: int) -> None:
    handles = everyone(door.handle())
    for step in steps(list(range(size))):
        numbers = {tuple(ranks): next(uuids) for ranks in step}
        own = next((ranks for ranks in step if rank in ranks), None)
        if own is not None:
            group = door.reconfigure(numbers[tuple(own)], [handles[each] for each in own])
            assert works(group, own.index(rank), len(own))
    agree(handles[rank] == door.handle())


def test_a_set_is_sorted(door: Mpicoll, rank: int, size: int) -> None:
    group = door.reconfigure(next(uuids), set(everyone(door.handle())))
    agree(works(group, rank, size))


def test_a_uuid_is_used_once(door: Mpicoll, rank: int, size: int) -> None:
    uuid, handles = next(uuids), everyone(door.handle())
    group = door.reconfigure(uuid, handles)
    with pytest.raises(RuntimeError, match="already used"):
        door.reconfigure(uuid, handles)
    agree(works(group, rank, size))


def test_wrong_handles_are_refused(door: Mpicoll, rank: int, size: int) -> None:
    handles = everyone(door.handle())
    for wrong, error, said in (
        ([], RuntimeError, "is not among the handles"),
        (handles[:rank] + handles[rank + 1 :], RuntimeError, "is not among the handles"),
        ([*handles, handles[0]], ValueError, "each rank of this job once"),
        ([*handles, "gloo:0:-1:0:"], ValueError, "in this job"),
        ([*handles, f"mpi:{size}:elsewhere:1"], ValueError, "in this job"),
        (["mpi:0:elsewhere:1", *handles[1:]] if rank == 0 else [], RuntimeError, "is not among the handles"),
    ):
        with pytest.raises(error, match=said):
            door.reconfigure(next(uuids), wrong)
    agree(works(door.reconfigure(next(uuids), handles), rank, size))


def test_who_has_not_come_is_named(door: Mpicoll, rank: int, size: int) -> None:
    """The limit is kept, and the ranks can reconfigure again."""
    handles, uuid, began = everyone(door.handle()), next(uuids), time.monotonic()
    group = door.reconfigure(uuid, handles)
    uuid = next(uuids)
    if rank != size - 1:
        with pytest.raises(mpicoll.OperationTimeout, match=rf"rank {size - 1} did not come within the timeout of 1 s"):
            door.reconfigure(uuid, handles, timedelta(seconds=1))
    agree(time.monotonic() - began < 20)
    agree(works(group, rank, size))  # nothing has changed
    agree(works(door.reconfigure(next(uuids), handles), rank, size))


def test_lists_that_differ_do_not_meet(door: Mpicoll, rank: int, size: int) -> None:
    handles, uuid = everyone(door.handle()), next(uuids)
    foreign = [*handles[:-1], f"mpi:{size - 1}:elsewhere:1"]
    with pytest.raises((mpicoll.OperationTimeout, RuntimeError), match=r"did not come|is not among the handles"):
        door.reconfigure(uuid, foreign if rank != 0 else handles, timedelta(seconds=1))
    agree(works(door.reconfigure(next(uuids), handles), rank, size))


def test_communicators_are_freed(door: Mpicoll, rank: int, size: int) -> None:
    handles = everyone(door.handle())
    first: Any = None
    for _ in range(3):
        door.reconfigure(next(uuids), handles)
        world = runtime.current()
        assert world is not None
        assert first is None or not first.base  # MPI.COMM_NULL
        first = world
    agree(first.base.Get_size() == size)


def test_without_a_world_of_all_ranks(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(runtime, "world_comm", lambda: None)
    with pytest.raises(ValueError, match="init_process_group makes it"):
        mpicoll.reconfigure(next(uuids), [f"mpi:{rank}:elsewhere:1"])
    agree(True)


@pytest.mark.skipif(not hasattr(torch.distributed, "_reconfigure"), reason="needs torch >= 2.14")
@pytest.mark.parametrize("backend", ["mpi", "cpu:mpi,cuda:gloo"])
def test_a_group_that_stays_the_same_object_is_refused(backend: str) -> None:
    with pytest.raises(NotImplementedError, match=r"mpi has no enable_reconfigure; mpicoll.reconfigure\(\) needs none"):
        torch.distributed.init_process_group(backend, enable_reconfigure=True)  # type: ignore[call-arg]
    agree(not torch.distributed.is_initialized())
