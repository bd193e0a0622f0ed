"""Python objects of any size, tensors inside, what cannot be pickled, and from whom they come."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpicoll as dist
from tests.support import agree, needs_sort_ranks

pytestmark = pytest.mark.usefixtures("world")


def of(rank: int) -> dict[str, Any]:
    """An object whose pickle has another size on every rank."""
    return {
        "rank": rank,
        "text": "å" * (rank * 100_000),
        "tensor": torch.arange(rank + 3.0).view(-1, 1).t(),
        "half": torch.full((2,), rank, dtype=torch.bfloat16),
        "nested": [None, (rank, {rank}), b"\0" * rank],
        "type": weakref.ref,
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize("make", [of, lambda rank: None, lambda rank: ""], ids=["large", "None", "empty"])
def test_collectives_of_objects(make: Callable[[int], Any], rank: int, size: int) -> None:  # traps 4, 40, 41
    """Lists are filled in place, on every root; ``device`` may be given."""
    everybody = [make(r) for r in range(size)]
    for root in range(size):
        gathered: list[Any] = [0] * size
        assert dist.all_gather_object(gathered, make(rank)) is None
        collected: list[Any] | None = [0] * size if rank == root else None
        dist.gather_object(make(rank), collected, root)
        received: list[Any] = [0]
        dist.scatter_object_list(received, everybody if rank == root else None, root)
        good = [equal(gathered, everybody), collected is None or equal(collected, everybody), equal(received, [make(rank)])]
        for device in (None, torch.device("cpu"), "cpu"):
            objects = [make(root), None, root] if rank == root else [0, 0, 0]
            dist.broadcast_object_list(objects, root, device=device)
            good.append(equal(objects, [make(root), None, root]))
        agree(all(good), good)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("door", [dist, torch.distributed], ids=lambda door: door.__name__)
def test_send_and_recv_object_list(door: Any, rank: int, size: int) -> None:  # trap 40
    after, before = (rank + 1) % size, (rank - 1) % size
    found: list[Any] = [None, None]
    if rank == 0:
        door.send_object_list([of(0), "x"], after)
        assert door.recv_object_list(found, before) == before
    else:
        assert door.recv_object_list(found, before) == before
        door.send_object_list([of(rank), "x"], after)
    agree(equal(found[0], of(before)) and found[1] == "x")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=needs_sort_ranks)], ids=["world", "reversed"])
def test_objects_from_anybody(order: int, rank: int, size: int) -> None:  # trap 12
    """recv_object_list(src=None) returns the global rank of the sender, all of whose objects come together."""
    group = None if order == 1 else dist.new_group(list(range(size))[::order], sort_ranks=False)
    if rank == 0:
        senders = []
        for _ in range(size - 1):
            found: list[Any] = [None, None]
            sender = dist.recv_object_list(found, group=group)
            assert equal(found[0], of(sender))
            assert found[1] == sender
            senders.append(sender)
        agree(sorted(senders) == list(range(1, size)), senders)
    else:
        dist.send_object_list([of(rank), rank], 0, group=group)
        agree(True)
