"""Python objects of any size through the object functions, from both doors: nothing, a byte, 50 MB, tensors inside.

What arrives is what pickle makes of it on one process.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

import mpicoll
from tests.support import agree

SECTION = "State"
BIG = 50_000_000  # bytes
Of = Callable[[int], Any]  # the object of each rank

through_both_doors = pytest.mark.parametrize("dist", [torch.distributed, mpicoll], ids=["torch", "mpicoll"])


def tensors(rank: int) -> dict[str, Any]:
    """Layouts that pickle has to carry, of another size on every rank."""
    torch.manual_seed(rank)
    base = torch.arange((rank + 2) * 6.0).reshape(rank + 2, 6)
    return {
        "strided": base[:, ::2],
        "transposed": base.t(),
        "shared": (base, base[1]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(rank, dtype=torch.bfloat16),
        "complex": torch.complex(base[0], base[1]).conj(),
        "bool": base > 5,
        "parameter": nn.Parameter(base[0].clone()),
        "module": nn.Linear(2, rank + 1),
        "size": base.shape,
        "dtype": base.dtype,
    }


def uneven(rank: int) -> bytes:
    """One byte on the even ranks, a megabyte and more on the odd ones."""
    return bytes([rank]) * (1_000_003 * rank if rank % 2 else 1)


KINDS: dict[str, Of] = {
    "none": lambda rank: None,
    "empty": lambda rank: [b"", "", [], {}, ()][rank % 5],
    "byte": lambda rank: bytes([rank]),
    "uneven": uneven,
    "tensors": tensors,
}


def only(rank: int, nbytes: int) -> Of:
    """Something large on one rank alone."""
    return lambda r: torch.arange(nbytes // 8 + 1).view(torch.uint8)[:nbytes] if r == rank else r


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return same and type(a) is type(b) and torch.equal(a, b) and a.requires_grad == b.requires_grad
    if isinstance(a, nn.Module):
        return isinstance(b, nn.Module) and equal(dict(a.state_dict()), dict(b.state_dict()))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and not isinstance(a, torch.Size):
        return type(a) is type(b) and len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
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


FEATURES = {
    "objects: all_gather_object, gather_object; another size on every rank": [all_gather, gather],
    "objects: broadcast_object_list, scatter_object_list": [broadcast, scatter],
    "objects: send_object_list, recv_object_list, use_batch": [send, send_in_a_batch],
}
CASES = [
    pytest.param(
        function,
        marks=[pytest.mark.feature(feature), *[pytest.mark.min_ranks(2)] * (function in (send, send_in_a_batch))],
        id=function.__name__,
    )
    for feature, functions in FEATURES.items()
    for function in functions
]


@through_both_doors
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", CASES)
def test_any_object(function: Any, dist: ModuleType, kind: str, size: int) -> None:
    """A block as long as the longest pickle, cut to another length, would not unpickle."""
    found = wrong(function, dist, KINDS[kind], list(range(size)))
    agree(not found, found)


@pytest.mark.feature("objects in subgroups, several groups at a time")
@through_both_doors
def test_in_subgroups(dist: ModuleType, rank: int, size: int) -> None:
    """Even and odd ranks each among themselves, roots by group rank; then all together again."""
    halves = [list(range(start, size, 2)) for start in range(min(2, size))]
    groups = [dist.new_group(ranks) for ranks in halves]
    mine, group = halves[rank % len(halves)], groups[rank % len(halves)]
    functions = [all_gather, gather, broadcast, scatter]
    found = [wrong(function, dist, uneven, mine, group) for function in functions]
    if len(groups) == 2:
        untouched: list[Any] = ["as it was"]
        with pytest.warns(UserWarning, match="does not belong"):
            dist.all_gather_object(untouched, rank, group=groups[1 - rank % 2])
        found.append([] if untouched == ["as it was"] else untouched)
    found += [wrong(function, dist, lambda r: r, list(range(size))) for function in functions]
    dist.destroy_process_group(group)
    agree(not any(found), (mine, found))


@pytest.mark.feature("objects of 50 MB on one rank, small ones on the others")
@through_both_doors
def test_large_and_small(dist: ModuleType, size: int) -> None:
    """Each rank pads to the largest, which only one has."""
    functions = [all_gather, gather, broadcast, scatter, *[send] * (size > 1)]
    found = [wrong(function, dist, only(size - 1, BIG // size), list(range(size))) for function in functions]
    found.append(wrong(broadcast, dist, only(0, BIG), list(range(size))))
    agree(not any(found), found)


@pytest.mark.feature("objects of more than 2 GiB")
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("function", [broadcast, send], ids=["broadcast", "send"])
def test_more_than_two_gib(function: Any, size: int) -> None:
    """The pickle's length does not fit into MPI's counts."""
    of = only(1, 2**31 + 4099)
    found = function(torch.distributed, of, [0, 1], 1, None)
    agree(all(equal(got, of(sender)) for sender, got in found.items()), function.__name__)
