"""Which rank is meant: global and group ranks, groups of some, ranks outside a group, and what they get back."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from tests.support import agree, needs_sort_ranks
from tests.support.doors import collectives, doors
from tests.support.tensors import same

pytestmark = pytest.mark.usefixtures("world")


def mine(rank: int) -> Tensor:
    return torch.full((2,), float(rank))


@pytest.mark.min_ranks(2)
@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
def test_outsiders_get_a_warning_and_none(rank: int) -> None:  # traps 1, 2, 10
    group = dist.new_group([0])
    if rank == 0:
        agree(dist.get_rank(group) == 0 and dist.get_world_size(group) == 1)
    else:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == -1
        assert dist.get_world_size(group) == -1
        tensor = torch.ones(3)
        calls: dict[str, Callable[[], object]] = {
            "isend": lambda: dist.isend(tensor, 0, group),
            "irecv": lambda: dist.irecv(tensor, 0, group),
        }
        for name, call in collectives(dist, 0, 1, root=0).items():
            for async_op in (False, True):
                calls[f"{name}, {async_op}"] = partial(call.start, group=group, async_op=async_op)
        for name, started in calls.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert started() is None, name
            told = [str(each.message) for each in caught]
            assert any("does not belong to" in text or "not part of" in text for text in told), (name, told)
        with pytest.warns(UserWarning, match="does not belong to"):
            assert dist.recv(tensor, 0, group) == -1
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.send(tensor, 0, group)
        agree(same(tensor, torch.ones(3)))
    dist.destroy_process_group(group) if rank == 0 else None


@needs_sort_ranks
@pytest.mark.min_ranks(3)
def test_ranks_of_a_group_are_sorted_unless_told_otherwise(rank: int, size: int) -> None:  # trap 11
    order = [2, 0]
    sorted_, given = dist.new_group(order), dist.new_group(order, sort_ranks=False)
    if rank in order:
        found = (dist.get_process_group_ranks(sorted_), dist.get_process_group_ranks(given))
        assert found == ([0, 2], [2, 0])
        assert (dist.get_rank(sorted_), dist.get_rank(given)) == (sorted(order).index(rank), order.index(rank))
        assert dist.get_global_rank(given, 0) == 2
        assert dist.get_group_rank(given, 0) == 1
        for group in (sorted_, given):
            dist.destroy_process_group(group)
    agree(True)


def rooted(rank: int, size: int, **by: Any) -> dict[str, Any]:
    """Calls with a root or a peer, given as ``by`` says: src and dst stand for each other."""

    def named(kind: str) -> dict[str, Any]:
        return {name.replace("root", kind): value for name, value in by.items()}

    return {
        "broadcast": lambda: dist.broadcast(torch.ones(2), **named("src")),
        "reduce": lambda: dist.reduce(torch.ones(2), **named("dst")),
        "gather": lambda: dist.gather(torch.ones(2), None, **named("dst")),
        "scatter": lambda: dist.scatter(torch.ones(2), None, **named("src")),
        "send": lambda: dist.send(torch.ones(2), **named("dst")),
        "recv": lambda: dist.recv(torch.ones(2), **named("src")),
        "isend": lambda: dist.isend(torch.ones(2), **named("dst")),
        "irecv": lambda: dist.irecv(torch.ones(2), **named("src")),
    }


def test_roots_that_are_refused(rank: int, size: int) -> None:  # traps 7, 9
    """None at all, both kinds, and ranks that the group does not have; the message names call and ranks."""
    optional = {"gather", "scatter", "recv", "irecv"}
    for name, call in rooted(rank, size).items():
        if name not in optional:
            with pytest.raises(ValueError, match=rf"{name}: (src|dst) \(a global rank\) or group_\1 must be given"):
                call()
    for name, call in rooted(rank, size, root=0, group_root=0).items():
        with pytest.raises(ValueError, match=rf"{name}: (src|dst) and group_\1 are both given"):
            call()
    for wrong in (size, -1, size + 100):
        for name, call in rooted(rank, size, root=wrong).items():
            with pytest.raises(ValueError, match=rf"{name}: (src|dst): global rank {wrong} is not in the group"):
                call()
        for name, call in rooted(rank, size, group_root=wrong).items():
            with pytest.raises(ValueError, match=rf"{name}: (src|dst) is rank {wrong}, the group has ranks 0 to {size - 1}"):
                call()
    for wrong in ("0", 0.0, [0], True, torch.zeros(2), (1,)):
        for by in ({"root": wrong}, {"group_root": wrong}):
            for name, call in rooted(rank, size, **by).items():
                with pytest.raises(TypeError, match=rf"{name}: (group_)?(src|dst) must be an int"):
                    call()
    dist.barrier()
    agree(True)


def test_ranks_may_be_integers_of_numpy_and_torch(rank: int, size: int) -> None:
    import numpy as np

    for root in (np.int64(size - 1), np.uint8(size - 1), torch.tensor(size - 1)):
        tensor = mine(rank)
        dist.broadcast(tensor, root)
        other = mine(rank)
        dist.broadcast(other, group_src=root)
        agree(same(tensor, mine(size - 1)) and same(other, mine(size - 1)), tensor)
    work = dist.irecv(tensor, np.int32((rank - 1) % size), tag=np.int32(5))
    dist.isend(mine(rank), np.int64((rank + 1) % size), tag=np.int64(5)).wait()
    work.wait()
    agree(same(tensor, mine((rank - 1) % size)))


@doors
def test_barrier_takes_device_ids(door: Any) -> None:  # trap 8
    for ids in (None, [0], [3, 4], *((0, []) if door is dist else ())):
        assert door.barrier(device_ids=ids) is None
        work = door.barrier(async_op=True, device_ids=ids)
        agree(isinstance(work, dist.Work) and work.wait())


def test_monitored_barriers_with_time_to_spare(rank: int, size: int) -> None:
    some = dist.new_group(list(range(max(1, size - 1))))
    for group in [None, some] if rank < max(1, size - 1) else [None]:
        for timeout in (None, 50, timedelta(seconds=50)):
            for wait_all_ranks in (False, True):
                assert dist.monitored_barrier(group, timeout, wait_all_ranks) is None
    agree(True)
