"""Arrays of NumPy in place of tensors: the operation reads and writes their memory."""

from typing import Any

import numpy as np
import pytest
import torch

import mpicoll as dist
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")


def ours(rank: int, count: int = 4) -> Any:
    return np.arange(count, dtype=np.float64) + 10 * rank


def empty(count: int = 4) -> Any:
    return np.full(count, -1.0)


def rows(size: int) -> list[Any]:
    return [empty() for _ in range(size)]


def expected(size: int) -> list[list[float]]:
    return [ours(rank).tolist() for rank in range(size)]


def test_reductions(rank: int, size: int) -> None:
    total = sum(ours(r) for r in range(size))
    all_of, to_last, one, packed = ours(rank), ours(rank), empty(), empty(1)
    result = dist.all_reduce(all_of)
    dist.reduce(to_last, dst=size - 1, op=dist.ReduceOp.MAX)
    dist.reduce_scatter(one, [ours(rank) for _ in range(size)])
    dist.reduce_scatter_tensor(packed, np.full(size, rank + 1.0))
    agree(result is None and np.array_equal(all_of, total) and np.array_equal(one, total), f"{all_of} {one}")
    agree(np.array_equal(to_last, ours(size - 1 if rank == size - 1 else rank)), f"{to_last}")
    agree(packed == size * (size + 1) / 2, f"{packed}")


def test_scans(rank: int, size: int) -> None:
    upto, before = np.array([rank + 1]), np.array([rank + 1])
    dist.scan(upto)
    dist.exscan(before)
    agree(upto == sum(range(rank + 2)) and (rank == 0 or before == sum(range(rank + 1))), f"{upto} {before}")


def test_coalesced(rank: int, size: int) -> None:
    several, lists = [ours(rank), np.ones(1)], [[empty(), empty(1)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [ours(rank), np.full(1, float(rank))])
    dist.all_reduce_coalesced(several)
    agree(np.array_equal(several[0], sum(ours(r) for r in range(size))) and several[1] == size, f"{several}")
    agree([row[0].tolist() for row in lists] == expected(size) and [row[1] for row in lists] == list(range(size)), f"{lists}")


def test_gathers(rank: int, size: int) -> None:
    from_last, everything, flat, own, mine = ours(rank), rows(size), empty(4 * size), rows(size), empty()
    dist.broadcast(from_last, src=size - 1)
    dist.all_gather(everything, ours(rank))
    dist.all_gather_into_tensor(flat, ours(rank))
    dist.gather(ours(rank), own if rank == 0 else None, dst=0)
    dist.scatter(mine, [ours(r) for r in range(size)] if rank == 0 else None, src=0)
    agree(np.array_equal(from_last, ours(size - 1)) and [row.tolist() for row in everything] == expected(size), f"{everything}")
    agree(flat.reshape(size, 4).tolist() == expected(size) and np.array_equal(mine, ours(rank)), f"{flat} {mine}")
    agree(rank != 0 or [row.tolist() for row in own] == expected(size), f"{own}")


def test_exchanges(rank: int, size: int) -> None:
    outputs, flat = [empty(1) for _ in range(size)], empty(size)
    dist.all_to_all(outputs, [np.array([10.0 * rank + r]) for r in range(size)])
    dist.all_to_all_single(flat, 10.0 * rank + np.arange(size))
    agree([*map(float, flat)] == [10.0 * r + rank for r in range(size)] == [*map(float, np.concatenate(outputs))], f"{flat}")


@pytest.mark.min_ranks(2)
def test_messages(rank: int, size: int) -> None:
    received, later, batch, to, source = empty(), empty(), empty(), (rank + 1) % size, (rank - 1) % size
    work = dist.irecv(later, source, tag=1)
    dist.isend(ours(rank), to, tag=1).wait()
    work.wait()
    if rank % 2 or rank == size - 1:
        dist.send(ours(rank), to)
        sender = dist.recv(received, source)
    else:
        sender = dist.recv(received, source)
        dist.send(ours(rank), to)
    for each in dist.batch_isend_irecv([dist.P2POp(dist.irecv, batch, source), dist.P2POp(dist.isend, ours(rank), to)]):
        each.wait()
    agree(sender == source and all(np.array_equal(each, ours(source)) for each in (received, later, batch)), f"{received}")


def test_asynchronous(rank: int, size: int) -> None:
    array = ours(rank)
    work = dist.all_reduce(array, async_op=True)
    agree(work is not None and work.wait() and np.array_equal(array, sum(ours(r) for r in range(size))), f"{array}")


def test_strides(rank: int, size: int) -> None:
    whole = np.zeros((4, 6), dtype=np.float32)
    whole[1:3, ::2] = rank + 1
    dist.all_reduce(whole[1:3, ::2])
    total = size * (size + 1) / 2
    agree(np.all(whole[1:3, ::2] == total) and whole.sum() == 6 * total, f"{whole}")


@pytest.mark.parametrize(
    ("array", "error", "words"),
    [
        (np.array(["a"]), TypeError, "all_reduce: can't convert np.ndarray of type numpy.str_"),
        (np.arange(4)[::-1], ValueError, "all_reduce: .*negative"),
        (np.frombuffer(b"12345678"), ValueError, r"all_reduce: an array of shape \(1,\) is read-only; pass a copy of it"),
    ],
)
def test_what_is_no_tensor_is_refused(array: Any, error: type[Exception], words: str, size: int) -> None:
    """On all ranks, so that nothing differs, and the group can be used afterwards."""
    with pytest.raises(error, match=words):
        dist.all_reduce(array)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    agree(tensor.item() == size)


def test_arrays_and_tensors_in_one_call(size: int) -> None:
    with pytest.raises(TypeError, match=r"all_gather: tensor_list\[0\] must be a torch.Tensor, got ndarray"):
        dist.all_gather(rows(size), torch.zeros(4, dtype=torch.float64))
    tensors = [torch.zeros(4, dtype=torch.float64) for _ in range(size)]
    dist.all_gather(tensors, np.ones(4))  # the arrays become tensors
    agree(all(torch.all(tensor == 1) for tensor in tensors))
