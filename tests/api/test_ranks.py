"""Which rank is meant: global and group ranks, groups of some, ranks outside a group, and what they get back."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from tests.support import agree, needs_sort_ranks
from tests.support.tensors import same

pytestmark = pytest.mark.usefixtures("world")


def mine(rank: int) -> Tensor:
    return torch.full((2,), float(rank))


def collectives(rank: int, size: int, group: Any, root: int) -> dict[str, Any]:
    """Every collective on ``group`` of ``size`` ranks with the global rank ``root``: name -> call(async_op)."""
    few = [torch.empty(2) for _ in range(size)]
    on_root = [torch.empty(2) for _ in range(size)] if rank == root else None
    long = torch.empty(2 * size)
    return {
        "all_reduce": lambda a: dist.all_reduce(mine(rank), group=group, async_op=a),
        "reduce": lambda a: dist.reduce(mine(rank), root, group=group, async_op=a),
        "broadcast": lambda a: dist.broadcast(mine(rank), root, group=group, async_op=a),
        "all_gather": lambda a: dist.all_gather(few, mine(rank), group=group, async_op=a),
        "all_gather_single": lambda a: dist.all_gather_single(long, mine(rank), group=group, async_op=a),
        "all_gather_into_tensor": lambda a: dist.all_gather_into_tensor(long, mine(rank), group=group, async_op=a),
        "gather": lambda a: dist.gather(mine(rank), on_root, root, group=group, async_op=a),
        "scatter": lambda a: dist.scatter(mine(rank), on_root, root, group=group, async_op=a),
        "reduce_scatter": lambda a: dist.reduce_scatter(mine(rank), few, group=group, async_op=a),
        "reduce_scatter_single": lambda a: dist.reduce_scatter_single(mine(rank), long, group=group, async_op=a),
        "reduce_scatter_tensor": lambda a: dist.reduce_scatter_tensor(mine(rank), long, group=group, async_op=a),
        "all_to_all": lambda a: dist.all_to_all(few, [t.clone() for t in few], group=group, async_op=a),
        "all_to_all_single": lambda a: dist.all_to_all_single(long, long.clone(), group=group, async_op=a),
        "barrier": lambda a: dist.barrier(group, async_op=a),
    }


def test_what_collectives_return(rank: int, size: int) -> None:  # traps 1, 6
    """None, or with async_op a Work whose wait says True as often as asked."""
    for name, call in collectives(rank, size, None, 0).items():
        assert call(False) is None, name
        work = call(True)
        assert isinstance(work, dist.Work), name
        assert (work.wait(), work.wait()) == (True, True), name
        assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None), name
    agree(True)


@pytest.mark.min_ranks(2)
@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
def test_outsiders_get_a_warning_and_none(rank: int, size: int) -> None:  # traps 1, 2, 10
    group = dist.new_group([0])
    if rank == 0:
        agree(dist.get_rank(group) == 0 and dist.get_world_size(group) == 1)
    else:
        assert group == dist.GroupMember.NON_GROUP_MEMBER
        assert dist.get_rank(group) == -1
        assert dist.get_world_size(group) == -1
        tensor = torch.ones(3)
        calls = {
            **collectives(rank, 1, group, 0),
            "isend": lambda _: dist.isend(tensor, 0, group),
            "irecv": lambda _: dist.irecv(tensor, 0, group),
        }
        for name, call in calls.items():
            for async_op in (False, True):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    assert call(async_op) is None, name
                told = [str(each.message) for each in caught]
                assert any("does not belong to" in text or "not part of" in text for text in told), (name, told)
        with pytest.warns(UserWarning, match="does not belong to"):
            assert dist.recv(tensor, 0, group) == -1
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.send(tensor, 0, group)
        agree(same(tensor, torch.ones(3)))
    dist.destroy_process_group(group) if rank == 0 else None


@needs_sort_ranks
@pytest.mark.min_ranks(2)
def test_roots_are_global_ranks(rank: int, size: int) -> None:  # traps 9, 11
    """In a group of the last ranks, in reverse order: the root by global rank, and by group rank."""
    ranks = list(range(1, size))[::-1]
    group = dist.new_group(ranks, sort_ranks=False)
    if rank >= 1:
        assert dist.get_rank(group) == ranks.index(rank)
        assert dist.get_process_group_ranks(group) == ranks
        for root in ranks:
            here = ranks.index(root)
            for by in ({"src": root}, {"group_src": here}):
                tensor = mine(rank)
                dist.broadcast(tensor, group=group, **by)
                assert same(tensor, mine(root))
                parts = [mine(10 * r) for r in ranks] if rank == root else None
                dist.scatter(tensor, parts, group=group, **by)
                assert same(tensor, mine(10 * rank))
            for by in ({"dst": root}, {"group_dst": here}):
                tensor = mine(rank)
                dist.reduce(tensor, group=group, **by)
                assert same(tensor, mine(sum(ranks)) if rank == root else mine(rank))
                parts = [torch.empty(2) for _ in ranks] if rank == root else None
                dist.gather(mine(rank), parts, group=group, **by)
                assert parts is None or all(same(t, mine(r)) for t, r in zip(parts, ranks, strict=True))
        outputs = [torch.empty(2) for _ in ranks]
        dist.all_gather(outputs, mine(rank), group=group)
        assert all(same(t, mine(r)) for t, r in zip(outputs, ranks, strict=True))
        dist.destroy_process_group(group)
    agree(True)


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


@pytest.mark.parametrize("ids", [None, [0], [3, 4], 0, []])
def test_barrier_takes_device_ids(ids: Any, rank: int, size: int) -> None:  # trap 8
    assert dist.barrier(device_ids=ids) is None
    work = dist.barrier(async_op=True, device_ids=ids)
    agree(isinstance(work, dist.Work) and work.wait())


def test_barriers_with_time_to_spare(rank: int, size: int) -> None:
    assert dist.barrier(timeout=timedelta(seconds=50)) is None
    for timeout in (None, 50, timedelta(seconds=50)):
        for wait_all_ranks in (False, True):
            assert dist.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all_ranks) is None
    agree(True)


@pytest.mark.min_ranks(2)
def test_monitored_barrier_of_a_group(rank: int, size: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.monitored_barrier(group, timedelta(seconds=30), wait_all_ranks=True)
        dist.destroy_process_group(group)
    agree(True)
