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

through_both_doors = pytest.mark.parametrize("dist", [torch.distributed, mpicoll], ids=["torch", "mpicoll"])


def tensors(rank: int) -> dict[str, Any]:
    """Layouts that pickle has to carry, of another size on every rank."""
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


def of(kind: str, rank: int) -> Any:
    """What rank ``rank`` contributes."""
    if kind == "none":
        return None
    if kind == "empty":
        return [b"", "", [], {}, ()][rank % 5]
    if kind == "byte":
        return bytes([rank])
    if kind == "uneven":  # one byte on the even ranks, a megabyte and more on the odd ones
        return bytes([rank]) * (1_000_003 * rank if rank % 2 else 1)
    torch.manual_seed(rank)
    return tensors(rank)


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


def right(found: Any, kind: str, rank: int) -> bool:
    return equal(found, pickle.loads(pickle.dumps(of(kind, rank))))


kinds = pytest.mark.parametrize("kind", ["none", "empty", "byte", "uneven", "tensors"])


@pytest.mark.feature("objects: all_gather_object, gather_object; another size on every rank")
@through_both_doors
@kinds
def test_gathered(dist: ModuleType, kind: str, rank: int, size: int) -> None:
    """A block as long as the longest pickle, cut to another length, would not unpickle."""
    found: list[Any] = [0] * size
    dist.all_gather_object(found, of(kind, rank))
    wrong = [r for r in range(size) if not right(found[r], kind, r)]
    for dst in {0, size - 1}:
        gathered: list[Any] | None = [0] * size if rank == dst else None
        dist.gather_object(of(kind, rank), gathered, dst)
        wrong += [r for r in range(size) if gathered is not None and not right(gathered[r], kind, r)]
    agree(not wrong, wrong)


@pytest.mark.feature("objects: broadcast_object_list, scatter_object_list")
@through_both_doors
@kinds
def test_given_out(dist: ModuleType, kind: str, rank: int, size: int) -> None:
    """Several objects in one call, of different sizes."""
    wrong: list[Any] = []
    for src in {0, size - 1}:
        objects = [of(kind, r) for r in range(3)] if rank == src else [0] * 3
        dist.broadcast_object_list(objects, src)
        wrong += [("broadcast", src, r) for r in range(3) if rank != src and not right(objects[r], kind, r)]
        found: list[Any] = [0]
        dist.scatter_object_list(found, [of(kind, r) for r in range(size)] if rank == src else None, src)
        wrong += [] if right(found[0], kind, rank) else [("scatter", src)]
    agree(not wrong, wrong)


@pytest.mark.feature("objects: send_object_list, recv_object_list, use_batch")
@pytest.mark.min_ranks(2)
@through_both_doors
@pytest.mark.parametrize("use_batch", [False, True], ids=["plain", "use_batch"])
@kinds
def test_sent(dist: ModuleType, use_batch: bool, kind: str, rank: int, size: int) -> None:
    """Round a ring: rank 0 begins, so that nobody waits for a send to be taken."""
    after, before = (rank + 1) % size, (rank - 1) % size
    found: list[Any] = [0, 0]

    def send() -> None:
        dist.send_object_list([of(kind, rank), of(kind, rank + 1)], after, use_batch=use_batch)

    def receive() -> Any:
        return dist.recv_object_list(found, before, use_batch=use_batch)

    if rank == 0:
        send()
        sender = receive()
    else:
        sender = receive()
        send()
    agree(sender == before and right(found[0], kind, before) and right(found[1], kind, before + 1), (sender, found))


def in_all(dist: ModuleType, obj: Any, root: int, group: Any, size: int) -> dict[str, Any]:
    """``obj`` through every collective object function; where a rank has nothing to get, it is missing."""
    rank = dist.get_rank(group)
    everything: list[Any] = [0] * size
    dist.all_gather_object(everything, obj, group=group)
    gathered: list[Any] | None = [0] * size if rank == root else None
    dist.gather_object(obj, gathered, group_dst=root, group=group)
    sent = [obj if rank == root else 0]
    dist.broadcast_object_list(sent, group_src=root, group=group)
    part: list[Any] = [0]
    dist.scatter_object_list(part, everything if rank == root else None, group_src=root, group=group)
    return {"all_gather": everything, "gather": gathered, "broadcast": sent[0], "scatter": part[0]}


@pytest.mark.feature("objects in subgroups, several groups at a time")
@through_both_doors
def test_in_subgroups(dist: ModuleType, rank: int, size: int) -> None:
    """Even and odd ranks each among themselves, roots by group rank; then all together again."""
    halves = [list(range(start, size, 2)) for start in range(min(2, size))]
    groups = [dist.new_group(ranks) for ranks in halves]
    mine, group = halves[rank % len(halves)], groups[rank % len(halves)]
    root = len(mine) - 1
    got = in_all(dist, of("uneven", rank), root, group, len(mine))
    expected = [of("uneven", r) for r in mine]
    good = (
        got["all_gather"] == expected
        and got["gather"] == (expected if rank == mine[root] else None)
        and got["broadcast"] == expected[root]
        and got["scatter"] == of("uneven", rank)
    )
    outside = groups[(rank + 1) % len(groups)]
    if len(groups) == 2:
        untouched: list[Any] = ["as it was"]
        with pytest.warns(UserWarning, match="does not belong"):
            dist.all_gather_object(untouched, rank, group=outside)
        good = good and untouched == ["as it was"]
    together = in_all(dist, rank, 0, None, size)
    dist.destroy_process_group(group)
    agree(good and together["all_gather"] == list(range(size)), (mine, together))


def big(rank: int, nbytes: int) -> torch.Tensor:
    tensor = torch.full((nbytes,), rank + 1, dtype=torch.uint8)
    tensor[0], tensor[-1] = 100 + rank, 200 + rank
    return tensor


def is_big(tensor: Any, rank: int, nbytes: int) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != nbytes:
        return False
    ends, middle = (int(tensor[0]), int(tensor[-1])), torch.aminmax(tensor[1:-1])
    return ends == (100 + rank, 200 + rank) and int(middle.min) == int(middle.max) == rank + 1


def calls(dist: ModuleType, rank: int, size: int, nbytes: int) -> dict[str, Callable[[], bool]]:
    """Each object function once, where the last rank alone has something large."""
    last = size - 1
    mine = big(rank, nbytes) if rank == last else rank

    def all_gather() -> bool:
        found: list[Any] = [0] * size
        dist.all_gather_object(found, mine)
        return found[:-1] == list(range(last)) and is_big(found[last], last, nbytes)

    def gather() -> bool:
        found: list[Any] | None = [0] * size if rank == 0 else None
        dist.gather_object(mine, found, 0)
        return found is None or (found[:-1] == list(range(last)) and is_big(found[last], last, nbytes))

    def broadcast() -> bool:
        objects = [last, mine] if rank == last else [0, 0]
        dist.broadcast_object_list(objects, last)
        return objects[0] == last and is_big(objects[1], last, nbytes)

    def scatter() -> bool:
        found: list[Any] = [0]
        dist.scatter_object_list(found, [mine, *range(1, size)] if rank == last else None, last)
        return is_big(found[0], last, nbytes) if rank == 0 else found == [rank]

    def send() -> bool:
        found: list[Any] = [0, 0]
        if rank == last:
            dist.send_object_list([mine, last], 0)
        elif rank == 0:
            dist.recv_object_list(found, last)
        return rank != 0 or (is_big(found[0], last, nbytes) and found[1] == last)

    every = {"all_gather": all_gather, "gather": gather, "broadcast": broadcast, "scatter": scatter}
    return every if size == 1 else {**every, "send": send}


@pytest.mark.feature("objects of 50 MB on one rank, small ones on the others")
@through_both_doors
def test_large_and_small(dist: ModuleType, rank: int, size: int) -> None:
    """Each rank pads to the largest, which only one has."""
    wrong = [name for name, call in calls(dist, rank, size, BIG // size).items() if not call()]
    objects = [big(0, BIG) if rank == 0 else 0]
    dist.broadcast_object_list(objects, 0)
    agree(not wrong and is_big(objects[0], 0, BIG), wrong)


@pytest.mark.feature("objects of more than 2 GiB")
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["broadcast", "send"])
def test_more_than_two_gib(name: str, rank: int, size: int) -> None:
    """13 GiB for both ranks. The pickle's length does not fit into MPI's counts."""
    call = calls(torch.distributed, rank, size, 2**31 + 4099)[name]
    agree(call(), name)
