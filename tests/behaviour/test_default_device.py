"""torch.set_default_device is for the program's tensors: what mpicoll makes for itself is where MPI, or the CPU, must find it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(count, dtype=dtype, device="cpu") + rank


def all_reduce_halves(rank: int, size: int) -> bool:
    x = numbers(rank, 40, torch.bfloat16)
    dist.all_reduce(x)
    return torch.equal(x, sum(numbers(r, 40) for r in range(size)).bfloat16())  # type: ignore[union-attr]


def all_reduce_strided(rank: int, size: int) -> bool:
    x = numbers(rank, 4000).view(2, -1).t()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return torch.equal(x, numbers(size - 1, 4000).view(2, -1).t())


def all_reduce_sparse(rank: int, size: int) -> bool:
    places = torch.tensor([[rank]], device="cpu")
    x = torch.sparse_coo_tensor(places, torch.ones(1, device="cpu"), (size,), device="cpu", check_invariants=False)
    dist.all_reduce(x)
    return bool(x.to_dense().eq(1).all())


def all_reduce_coalesced(rank: int, size: int) -> bool:
    given = [numbers(rank, 10), numbers(rank, 20)]
    dist.all_reduce_coalesced(given)
    return all(torch.equal(x, sum(numbers(r, x.numel()) for r in range(size))) for x in given)  # type: ignore[arg-type]


def reduce_scatter(rank: int, size: int) -> bool:
    output = numbers(0, 6, torch.float16)
    dist.reduce_scatter(output, [numbers(rank, 6, torch.float16) for _ in range(size)])
    return torch.equal(output, sum(numbers(r, 6, torch.float16) for r in range(size)))  # type: ignore[arg-type]


def all_gather(rank: int, size: int) -> bool:
    outputs = [numbers(0, 5 + r) for r in range(size)]
    dist.all_gather(outputs, numbers(rank, 5 + rank))
    return all(torch.equal(x, numbers(r, 5 + r)) for r, x in enumerate(outputs))


def all_to_all(rank: int, size: int) -> bool:
    outputs = [numbers(0, 3 + r + rank) for r in range(size)]
    dist.all_to_all(outputs, [numbers(rank, 3 + r + rank) for r in range(size)])
    return all(torch.equal(x, numbers(r, 3 + r + rank)) for r, x in enumerate(outputs))


def objects(rank: int, size: int) -> bool:
    found: list[object] = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    given: list[object] = [rank, "two"]
    dist.broadcast_object_list(given, 0)
    return found == [{"rank": r} for r in range(size)] and given == [0, "two"]


def messages(rank: int, size: int) -> bool:
    x = numbers(0, 3000)
    request = dist.irecv(x, (rank - 1) % size)
    sent = dist.isend(numbers(rank, 3000), (rank + 1) % size)
    for work in (request, sent):
        assert work is not None
        work.wait()
    return torch.equal(x, numbers((rank - 1) % size, 3000))


def monitored_barrier(rank: int, size: int) -> bool:
    dist.monitored_barrier(timeout=timedelta(seconds=10))
    return True


CALLS = [
    all_reduce_halves, all_reduce_strided, all_reduce_sparse, all_reduce_coalesced, reduce_scatter, all_gather, all_to_all,
    objects, messages, monitored_barrier,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_default_device(call: Callable[[int, int], bool], rank: int, size: int) -> None:
    with torch.device("meta"):
        right = call(rank, size)
    agree(right)
