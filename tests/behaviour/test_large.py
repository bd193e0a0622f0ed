"""More than 2^31 - 1 elements and more than 2 GiB in one call, where MPI's counts and displacements end (traps 20, 74).

Two ranks, uint8; each test says what it needs of memory, both ranks and MPI's own buffers together.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from tests.support import agree

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.slow, pytest.mark.ranks(2), pytest.mark.timeout(200)]
N = 2**31 + 4099  # not a multiple of anything
EDGES = [0, 1, 2**20, 2**30 - 1, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, N - 1]


def marked(rank: int, count: int) -> Tensor:
    """Bytes that all say rank + 1, but for the edges, each of which has a number of its own."""
    tensor = torch.full((count,), rank + 1, dtype=torch.uint8)
    for number, edge in enumerate(edges(count)):
        tensor[edge] = 10 * (number + 1) + rank
    return tensor


def edges(count: int) -> list[int]:
    return [*(edge for edge in EDGES if edge < count - 1), count - 1]


def is_marked(tensor: Tensor, rank: int) -> bool:
    """tensor is ``marked(rank, its length)``; it is not afterwards. Takes no memory."""
    found = [int(tensor[edge]) for edge in edges(tensor.numel())]
    for edge in edges(tensor.numel()):
        tensor[edge] = rank + 1
    low, high = torch.aminmax(tensor)
    return found == [10 * (i + 1) + rank for i in range(len(found))] and int(low) == int(high) == rank + 1


def is_sum(tensor: Tensor, at: int = 0, count: int = N) -> bool:
    """tensor is both ranks' ``marked(rank, count)`` added up, from position ``at`` on."""
    here = {edge - at: 20 * (i + 1) + 1 for i, edge in enumerate(edges(count)) if at <= edge < at + tensor.numel()}
    found = {edge: int(tensor[edge]) for edge in here}
    for edge in here:
        tensor[edge] = 3
    low, high = torch.aminmax(tensor)
    return found == here and int(low) == int(high) == 3


@pytest.fixture(autouse=True)
def _together(world: object) -> Iterator[None]:
    """One rank's memory is free before the other's test begins."""
    yield
    dist.barrier()


def test_all_reduce(rank: int) -> None:
    """6 GiB."""
    tensor = marked(rank, N)
    dist.all_reduce(tensor)
    agree(is_sum(tensor))


def test_reduce(rank: int) -> None:
    """7 GiB."""
    tensor = marked(rank, N)
    dist.reduce(tensor, 1)
    agree(is_sum(tensor) if rank == 1 else is_marked(tensor, 0))


def test_broadcast(rank: int) -> None:
    """4 GiB."""
    tensor = marked(1, N) if rank == 1 else torch.zeros(N, dtype=torch.uint8)
    dist.broadcast(tensor, 1)
    agree(is_marked(tensor, 1))


@pytest.mark.parametrize("call", ["send, recv", "isend, irecv", "any source"])
def test_message(call: str, rank: int) -> None:
    """4 GiB. One message beside small ones, into a buffer that is larger still."""
    if rank == 0:
        dist.send(torch.tensor([1.0]), 1, tag=1)
        dist.isend(marked(0, N), 1).wait() if call == "isend, irecv" else dist.send(marked(0, N), 1)
        dist.send(torch.tensor([2.0]), 1)
        agree(True)
    else:
        tensor, small, last = torch.full((N + 5,), 77, dtype=torch.uint8), torch.zeros(1), torch.zeros(1)
        if call == "isend, irecv":
            work = dist.irecv(tensor, 0)
            assert work.wait()
            assert work.source_rank() == 0
        else:
            assert dist.recv(tensor, None if call == "any source" else 0) == 0
        dist.recv(last, 0)
        dist.recv(small, 0, tag=1)
        good = is_marked(tensor[:N], 0) and tensor[N:].tolist() == [77] * 5
        agree(good and (small.item(), last.item()) == (1.0, 2.0))


def test_all_gather_single(rank: int) -> None:
    """13 GiB. Blocks of more than 2^31 bytes."""
    output = torch.zeros(2, N, dtype=torch.uint8)
    dist.all_gather_single(output, marked(rank, N))
    agree(is_marked(output[0], 0) and is_marked(output[1], 1))


def test_all_gather(rank: int) -> None:
    """10 GiB. Blocks of less, more than 2^31 bytes in all."""
    count = N // 2
    outputs = [torch.zeros(count, dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(outputs, marked(rank, count))
    agree(is_marked(outputs[0], 0) and is_marked(outputs[1], 1))


def test_uneven_all_gather(rank: int) -> None:
    """6 GiB. One block of more, one of little."""
    counts = [1000, N]
    outputs = [torch.zeros(count, dtype=torch.uint8) for count in counts]
    dist.all_gather(outputs, marked(rank, counts[rank]))
    agree(is_marked(outputs[0], 0) and is_marked(outputs[1], 1))


def test_reduce_scatter_single(rank: int) -> None:
    """8 GiB."""
    count = N // 2
    output = torch.zeros(count, dtype=torch.uint8)
    dist.reduce_scatter_single(output, marked(rank, 2 * count))
    agree(is_sum(output, rank * count, 2 * count))


def test_uneven_reduce_scatter(rank: int) -> None:
    """12 GiB. The second block alone has more than 2^31 bytes. MAX, because MPI sums uneven blocks of 8 bits as int32: 34 GiB."""
    counts = [1000, N]
    output = torch.zeros(counts[rank], dtype=torch.uint8)
    dist.reduce_scatter(output, [marked(rank, count) for count in counts], dist.ReduceOp.MAX)
    agree(is_marked(output, 1))


def test_all_to_all_single(rank: int) -> None:
    """9 GiB. Rank 0 sends nearly all of it to rank 1."""
    sizes = [[500, N], [3000, 7]]  # [source][target]
    mine = torch.cat([marked(rank, count) for count in sizes[rank]])
    takes = [sizes[source][rank] for source in range(2)]
    output = torch.zeros(sum(takes), dtype=torch.uint8)
    dist.all_to_all_single(output, mine, takes, sizes[rank])
    agree(all(is_marked(part, source) for source, part in enumerate(output.split(takes))))


def test_gather_and_scatter(rank: int) -> None:
    """8 GiB. From rank 1 to rank 0 and back."""
    counts = [10, N]
    mine = marked(rank, counts[rank])
    parts = [torch.zeros(count, dtype=torch.uint8) for count in counts] if rank == 0 else None
    dist.gather(mine, parts, 0)
    mine.zero_()
    dist.scatter(mine, parts, 0)
    agree(is_marked(mine, rank))
