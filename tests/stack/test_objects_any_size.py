"""Python objects of any size through the object functions, from both doors: a byte, 50 MB, more than 2 GiB.

What arrives is what pickle makes of it on one process.
"""

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed

import mpicoll
from tests.support import agree

BIG = 50_000_000  # bytes
Of = Callable[[int], Any]  # the object of each rank

through_both_doors = pytest.mark.parametrize("dist", [torch.distributed, mpicoll], ids=["torch", "mpicoll"])


def uneven(rank: int) -> bytes:
    """One byte on the even ranks, a megabyte and more on the odd ones."""
    return bytes([rank]) * (1_000_003 * rank if rank % 2 else 1)


def matrix(rank: int) -> torch.Tensor:
    return torch.arange((rank + 2) * 6.0).reshape(rank + 2, 6).t()[::2]


def only(rank: int, nbytes: int) -> Of:
    """Something large on one rank alone."""
    return lambda r: torch.arange(nbytes // 8 + 1).view(torch.uint8)[:nbytes] if r == rank else r


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


# Each hands over the objects of ``of`` in a group of these ranks, from or to the root, and returns what came, by sender.


def all_gather(dist: ModuleType, of: Of, ranks: list[int], root: int, group: Any) -> dict[int, Any]:
    found: list[Any] = [0] * len(ranks)
    dist.all_gather_object(found, of(dist.get_rank()), group=group)
    return dict(zip(ranks, found, strict=True))


def gather(dist: ModuleType, of: Of, ranks: list[int], root: int, group: Any) -> dict[int, Any]:
    found: list[Any] | None = [0] * len(ranks) if dist.get_rank() == root else None
    dist.gather_object(of(dist.get_rank()), found, group_dst=ranks.index(root), group=group)
    return dict(zip(ranks, found, strict=True)) if found else {}


def broadcast(dist: ModuleType, of: Of, ranks: list[int], root: int, group: Any) -> dict[int, Any]:
    """Several objects in one call, of different sizes."""
    found = [of(rank) if dist.get_rank() == root else 0 for rank in ranks]
    dist.broadcast_object_list(found, group_src=ranks.index(root), group=group)
    return dict(zip(ranks, found, strict=True))


def scatter(dist: ModuleType, of: Of, ranks: list[int], root: int, group: Any) -> dict[int, Any]:
    found: list[Any] = [0]
    objects = [of(rank) for rank in ranks] if dist.get_rank() == root else None
    dist.scatter_object_list(found, objects, group_src=ranks.index(root), group=group)
    return {dist.get_rank(): found[0]}


def send(dist: ModuleType, of: Of, ranks: list[int], root: int, group: Any, use_batch: bool = False) -> dict[int, Any]:
    """Round a ring: the root begins, so that nobody waits for a send to be taken. The second object is the sender's rank."""
    here, found = ranks.index(dist.get_rank()), [0, 0]
    after, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]
    steps = [
        lambda: dist.send_object_list([of(ranks[here]), ranks[here]], after, group, use_batch=use_batch),
        lambda: dist.recv_object_list(found, before, group, use_batch=use_batch),
    ]
    senders = [step() for step in (steps if dist.get_rank() == root else steps[::-1])]
    return {before if before in senders and found[1] == before else -1: found[0]}


def send_in_a_batch(*args: Any) -> dict[int, Any]:
    return send(*args, use_batch=True)


def wrong(function: Callable[..., dict[int, Any]], dist: ModuleType, of: Of, ranks: list[int], group: Any = None) -> list[Any]:
    """What arrived otherwise than pickle makes it, with either end of the group as the root."""
    found = [(root, function(dist, of, ranks, root, group)) for root in sorted({ranks[0], ranks[-1]})]
    pairs = [(root, sender, got) for root, answer in found for sender, got in answer.items()]
    return [(root, sender) for root, sender, got in pairs if sender < 0 or not equal(got, pickle.loads(pickle.dumps(of(sender))))]


CASES = [
    pytest.param(function, marks=[pytest.mark.min_ranks(2)] * (function in (send, send_in_a_batch)), id=function.__name__)
    for function in (all_gather, gather, broadcast, scatter, send, send_in_a_batch)
]


@through_both_doors
@pytest.mark.parametrize("function", CASES)
def test_another_size_on_every_rank(function: Any, dist: ModuleType, size: int) -> None:
    """A block as long as the longest pickle, cut to another length, would not unpickle. Kinds of objects: api/test_objects."""
    found = [wrong(function, dist, of, list(range(size))) for of in (uneven, matrix)]
    agree(not any(found), found)


@through_both_doors
def test_in_subgroups(dist: ModuleType, rank: int, size: int) -> None:
    """Even and odd ranks each among themselves, roots by group rank; then all together again."""
    halves = [list(range(start, size, 2)) for start in range(min(2, size))]
    mine, group = halves[rank % len(halves)], [dist.new_group(ranks) for ranks in halves][rank % len(halves)]
    functions = [all_gather, gather, broadcast, scatter]
    found = [wrong(function, dist, uneven, mine, group) for function in functions]
    found += [wrong(function, dist, lambda r: r, list(range(size))) for function in functions]
    dist.destroy_process_group(group)
    agree(not any(found), (mine, found))


@through_both_doors
def test_large_and_small(dist: ModuleType, size: int) -> None:
    """Each rank pads to the largest, which only one has."""
    functions = [all_gather, gather, broadcast, scatter, *[send] * (size > 1)]
    found = [wrong(function, dist, only(size - 1, BIG // size), list(range(size))) for function in functions]
    found.append(wrong(broadcast, dist, only(0, BIG), list(range(size))))
    agree(not any(found), found)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("function", [broadcast, send], ids=["broadcast", "send"])
def test_more_than_two_gib(function: Any, size: int) -> None:
    """The pickle's length does not fit into MPI's counts."""
    of = only(1, 2**31 + 4099)
    found = function(torch.distributed, of, [0, 1], 1, None)
    agree(all(equal(got, of(sender)) for sender, got in found.items()), function.__name__)
