"""The classic collectives take what functional ones return, an AsyncCollectiveTensor: a tensor round the one with the memory."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import Shard, init_device_mesh, zeros

import mpicoll
from tests.support import agree

SECTION = "Functional collectives and torch.compile"

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning")

through_both_doors = pytest.mark.parametrize("dist", [torch.distributed, mpicoll], ids=["torch", "mpicoll"])


made: list[Tensor] = []


def unfinished(*values: float) -> Tensor:
    """``values`` times the number of ranks, which nobody has waited for."""
    tensor = funcol.all_reduce(torch.tensor(values, dtype=torch.float32), "sum", torch.distributed.group.WORLD)  # type: ignore[arg-type]
    assert type(tensor) is funcol.AsyncCollectiveTensor
    made.append(tensor)
    return tensor


def reduced(dist: Any, n: int, r: int) -> list[Tensor]:
    tensor = unfinished(1, 2)
    dist.all_reduce(tensor)
    other = unfinished(3)
    work = dist.all_reduce(other, op=torch.distributed.ReduceOp.MAX, async_op=True)
    work.wait()
    return [tensor / n, work.get_future().wait()[0] if torch.distributed.get_backend() == "mpi" else other]


def broadcast(dist: Any, n: int, r: int) -> list[Tensor]:
    read, written = unfinished(1, 2), unfinished(7)
    first, second = (read, torch.tensor([3.0 * n])) if r == 0 else (torch.zeros(2), written)
    dist.broadcast(first, 0)
    dist.broadcast(second, 0)
    return [first, second]


def to_one(dist: Any, n: int, r: int) -> list[Tensor]:
    tensor, other = unfinished(1, 2), unfinished(3)
    dist.reduce(tensor, 0)
    dist.reduce(other, n - 1)
    return [tensor / n if r == 0 else tensor, other / n if r == n - 1 else other]


def gathered(dist: Any, n: int, r: int) -> list[Tensor]:
    parts = [torch.zeros(2) for _ in range(n)]
    dist.all_gather(parts, unfinished(1, 2))
    whole = torch.zeros(n)
    dist.all_gather_into_tensor(whole, unfinished(3))
    return [parts[-1], whole[-1:]]


def gathered_and_scattered(dist: Any, n: int, r: int) -> list[Tensor]:
    parts = [torch.zeros(2) for _ in range(n)]
    dist.gather(unfinished(1, 2), parts if r == 0 else None, 0)
    part, sources = torch.zeros(1), [unfinished(3) for _ in range(n)]
    dist.scatter(part, sources if r == 0 else None, 0)
    return [parts[-1] if r == 0 else torch.tensor([1.0, 2.0]) * n, part]


def written(dist: Any, n: int, r: int) -> list[Tensor]:
    targets = [unfinished(8, 8) for _ in range(n)]
    dist.all_gather(targets, torch.tensor([1.0, 2.0]) * n)
    single = unfinished(8)
    dist.reduce_scatter_tensor(single, torch.full((n,), 3.0))
    return [targets[-1], single]


def coalesced(dist: Any, n: int, r: int) -> list[Tensor]:
    tensors = [unfinished(1, 2), unfinished(3)]
    dist.all_reduce_coalesced(tensors)
    return [tensor / n for tensor in tensors]


def scattered(dist: Any, n: int, r: int) -> list[Tensor]:
    part = torch.zeros(2)
    dist.reduce_scatter(part, [unfinished(1, 2) for _ in range(n)])
    single = torch.zeros(1)
    dist.reduce_scatter_tensor(single, unfinished(*[3] * n))
    return [part / n, single / n]


def exchanged(dist: Any, n: int, r: int) -> list[Tensor]:
    parts = [torch.zeros(2) for _ in range(n)]
    dist.all_to_all(parts, [unfinished(1, 2) for _ in range(n)])
    whole = torch.zeros(n)
    dist.all_to_all_single(whole, unfinished(*[3] * n))
    return [parts[-1], whole[-1:]]


def sent(dist: Any, n: int, r: int) -> list[Tensor]:
    into, single = torch.zeros(2), unfinished(9)
    works = [dist.isend(unfinished(1, 2), (r + 1) % n), dist.irecv(into, (r - 1) % n)]
    works += [dist.isend(unfinished(3), (r + 1) % n, tag=1), dist.irecv(single, (r - 1) % n, tag=1)]
    for work in works:
        work.wait()
    return [into, single]


CALLS: list[Callable[[Any, int, int], list[Tensor]]] = [
    reduced, broadcast, to_one, gathered, gathered_and_scattered, written, scattered, coalesced, exchanged,
]  # fmt: skip
SENT = pytest.param(sent, marks=pytest.mark.min_ranks(2))  # torch sends nothing to oneself


@pytest.mark.feature("AsyncCollectiveTensor given to the classic collectives")
@through_both_doors
@pytest.mark.parametrize("call", [*CALLS, SENT], ids=lambda call: call.__name__)
def test_unfinished_tensors(dist: ModuleType, call: Callable[[Any, int, int], list[Tensor]], rank: int, size: int) -> None:
    """It is waited for and unwrapped, whether it is read or written: it has no memory at its own address."""
    found = [tensor.tolist() for tensor in call(dist, size, rank)]
    while made:
        funcol.wait_tensor(made.pop())  # those that only some ranks have used
    expected = [[1.0 * size, 2.0 * size], [3.0 * size]]
    agree(found == expected, found)


@pytest.mark.feature("a DTensor given to a classic collective is refused")
@through_both_doors
def test_dtensors_are_refused(dist: ModuleType, rank: int, size: int) -> None:
    """By an error that says so, on every rank, and the group goes on; torch's own is a NotImplementedError of its dispatcher."""
    tensor = zeros(size, 3, device_mesh=init_device_mesh("cpu", (size,)), placements=[Shard(0)])
    with pytest.raises((TypeError, NotImplementedError), match=r"DTensor|sharding strategy"):
        dist.all_reduce(tensor)
    one = torch.ones(1)
    dist.all_reduce(one)
    agree(one.item() == size)
