"""The pre and post hooks of a group (torch >= 2.14) see the operations of both doors."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mpicoll as dist
from mpicoll._api import groups
from mpicoll._c10d import hooks
from tests.support import agree

pytestmark = pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="needs torch >= 2.14")
ONES = torch.ones(2)

CALLS: dict[str, Callable[[Any, int, int], object]] = {
    "ALLREDUCE": lambda door, rank, size: door.all_reduce(ONES.clone()),
    "REDUCE": lambda door, rank, size: door.reduce(ONES.clone(), 0),
    "BROADCAST": lambda door, rank, size: door.broadcast(ONES.clone(), 0),
    "ALLGATHER": lambda door, rank, size: door.all_gather([torch.empty(2) for _ in range(size)], ONES),
    "GATHER": lambda door, rank, size: door.gather(ONES, [torch.empty(2) for _ in range(size)] if rank == 0 else None),
    "SCATTER": lambda door, rank, size: door.scatter(torch.empty(2), [ONES] * size if rank == 0 else None),
    "REDUCE_SCATTER": lambda door, rank, size: door.reduce_scatter(torch.empty(2), [ONES] * size),
    "ALLTOALL": lambda door, rank, size: door.all_to_all_single(torch.empty(size), torch.ones(size)),
    "BARRIER": lambda door, rank, size: door.barrier(),
    "SEND": lambda door, rank, size: exchange(door, rank, size),
    "RECV": lambda door, rank, size: exchange(door, rank, size),
}


def exchange(door: Any, rank: int, size: int) -> None:
    work = door.isend(ONES, (rank + 1) % size)
    door.recv(torch.empty(2), (rank - 1) % size)
    work.wait()


@pytest.fixture
def seen(world: None) -> Iterator[list[tuple[str, str, int]]]:
    """What the hooks of the world have been called with: kind, operation and number of the call."""
    group: Any = dist.group.WORLD
    calls: list[tuple[str, str, int]] = []
    group.register_pre_hook(1, lambda call: calls.append(("pre", call.name.name, call.op_id)))
    group.register_post_hook(2, lambda call: calls.append(("post", call.name.name, call.op_id)))
    yield calls
    group.unregister_pre_hook(1)
    group.unregister_post_hook(2)


@pytest.mark.parametrize("door", [dist, torch.distributed], ids=["mpicoll", "torch"])
@pytest.mark.parametrize("name", CALLS)
def test_both_see(name: str, door: Any, rank: int, size: int, seen: list[tuple[str, str, int]]) -> None:
    CALLS[name](door, rank, size)
    mine = [(kind, number) for kind, operation, number in seen if operation == name]
    agree(len(mine) == 2 and mine == [("pre", mine[0][1]), ("post", mine[0][1])], f"{seen}")


@pytest.mark.usefixtures("world")
def test_some_ranks_have_hooks(rank: int, size: int) -> None:
    """They take another way to the same calls of MPI."""
    group: Any = dist.group.WORLD
    before, called = torch.full((2,), rank + 1.0), []
    dist.all_reduce(before)
    if rank == 0:
        group.register_pre_hook(7, called.append)
    now = torch.full((2,), rank + 1.0)
    dist.all_reduce(now)
    work = dist.all_reduce(now, async_op=True)
    assert work is not None
    work.wait()
    if rank == 0:
        group.unregister_pre_hook(7)
    agree(now.equal(before * size) and len(called) == (2 if rank == 0 else 0), f"{now} {called}")


def test_a_hook_that_raises_stops_the_call(seen: list[tuple[str, str, int]]) -> None:
    """Before a byte moves: all ranks can go on."""
    group: Any = dist.group.WORLD

    def refuse(call: object) -> None:
        raise ValueError("not now")

    group.register_pre_hook(3, refuse)
    tensor = torch.ones(2)
    with pytest.raises(ValueError, match="not now"):
        dist.all_reduce(tensor)
    group.unregister_pre_hook(3)
    unchanged = tensor.equal(torch.ones(2))
    dist.barrier()
    agree(unchanged)


def test_what_torch_does_not_have_works_on(rank: int, size: int, seen: list[tuple[str, str, int]]) -> None:
    tensor = torch.ones(2)
    dist.scan(tensor)
    agree(tensor.equal(torch.full((2,), rank + 1.0)) and not seen, f"{tensor} {seen}")


def test_without_hooks_the_short_way_again(seen: list[tuple[str, str, int]]) -> None:
    group: Any = dist.group.WORLD
    hooked = groups.of(None) is None
    group.unregister_pre_hook(1)
    still = groups.of(None) is None
    group.unregister_post_hook(2)
    agree(hooked and still and groups.of(None) is not None and group not in hooks.hooked)


@pytest.mark.usefixtures("no_world")
def test_groups_that_have_been_destroyed_are_forgotten() -> None:
    for _ in range(2):
        dist.init_process_group()
        group: Any = dist.group.WORLD
        group.register_pre_hook(1, lambda call: None)
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    agree(list(hooks.hooked) == [group])
