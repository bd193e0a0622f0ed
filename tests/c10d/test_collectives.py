"""Every collective of torch.distributed through init_process_group("mpi"), sync and async, against values computed here."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support import agree
from tests.support.torch_backend import DTYPES, NEW_NAMES, both, ended, of_rank, same


@pytest.fixture(autouse=True)
def mpi_world(_end_of_world: None) -> None:
    if not dist.is_initialized():
        dist.init_process_group("mpi")


@both
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_all_reduce(op: str, async_op: bool, rank: int, size: int) -> None:
    mine = of_rank(rank, 4, 3)
    address = mine.data_ptr()
    done = ended(dist.all_reduce(mine, getattr(dist.ReduceOp, op), async_op=async_op), async_op)
    everybody = torch.stack([of_rank(r, 4, 3) for r in range(size)])
    expected = {
        "SUM": everybody.sum(0),
        "AVG": everybody.mean(0),
        "PRODUCT": everybody.prod(0),
        "MIN": everybody.amin(0),
        "MAX": everybody.amax(0),
    }[op]
    agree(done and torch.allclose(mine, expected) and mine.data_ptr() == address, mine)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_dtypes(dtype: torch.dtype, rank: int, size: int) -> None:
    mine = of_rank(rank, 5, dtype=dtype)
    dist.all_reduce(mine)
    everybody = torch.stack([of_rank(r, 5, dtype=dtype) for r in range(size)])
    expected = everybody.any(0) if dtype == torch.bool else everybody.sum(0).to(dtype)
    agree(same(mine, expected), mine)


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_all_reduce_bitwise(op: str, rank: int, size: int) -> None:
    mine = of_rank(rank, 5, dtype=torch.int32)
    dist.all_reduce(mine, getattr(dist.ReduceOp, op))
    expected = of_rank(0, 5, dtype=torch.int32)
    for r in range(1, size):
        other = of_rank(r, 5, dtype=torch.int32)
        expected = {"BAND": expected & other, "BOR": expected | other, "BXOR": expected ^ other}[op]
    agree(same(mine, expected), mine)


def test_all_reduce_premultiplied(rank: int, size: int) -> None:
    """PREMUL_SUM travels as an object with a factor, not as a name (traps 3 and 33a: FSDP2 uses it)."""
    mine = of_rank(rank, 5)
    dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5))
    agree(torch.allclose(mine, sum(of_rank(r, 5) * 0.5 for r in range(size))), mine)


def test_strided_all_reduce_is_in_place(rank: int, size: int) -> None:
    """trap 28: a strided view is reduced where it lies, and its neighbours stay."""
    whole = of_rank(rank, 4, 6)
    dist.all_reduce(whole[:, ::2])
    expected = of_rank(rank, 4, 6)
    expected[:, ::2] = sum(of_rank(r, 4, 6) for r in range(size))[:, ::2]
    agree(same(whole, expected), whole)


def test_refusals_come_before_any_byte(rank: int) -> None:
    """trap 22, 25, 3: on every rank alike, so that nobody waits."""
    with pytest.raises(TypeError):
        dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)
    with pytest.raises(TypeError):
        dist.all_reduce(torch.ones(3), dist.ReduceOp.BAND)
    with pytest.raises((TypeError, ValueError)):
        dist.all_reduce(torch.ones(3), "sum")  # type: ignore[arg-type]
    agree(True)


@both
def test_all_reduce_coalesced(async_op: bool, rank: int, size: int) -> None:
    tensors = [of_rank(rank, 3), of_rank(rank, 2, 2)]
    with pytest.warns(FutureWarning) if hasattr(dist.all_reduce_coalesced, "__deprecated__") else contextlib.nullcontext():
        answer = dist.all_reduce_coalesced(tensors, async_op=async_op)
    if async_op:  # trap 4: a Future, not a Work
        answer.wait()
    expected = [sum(of_rank(r, 3) for r in range(size)), sum(of_rank(r, 2, 2) for r in range(size))]
    agree(all(map(same, tensors, expected)) and (async_op or answer is None), tensors)


@both
def test_broadcast(async_op: bool, rank: int, size: int) -> None:
    wrong = []
    for src in range(size):
        mine = of_rank(rank, 3, 2) + 7
        if not ended(dist.broadcast(mine, src, async_op=async_op), async_op) or not same(mine, of_rank(src, 3, 2) + 7):
            wrong.append((src, mine))
    agree(not wrong, wrong)


def test_broadcast_arguments(rank: int, size: int) -> None:
    """trap 7."""
    mine = torch.ones(2)
    with pytest.raises(ValueError, match="rank"):
        dist.broadcast(mine)
    with pytest.raises(ValueError, match="rank"):
        dist.broadcast(mine, src=0, group_src=0)
    dist.broadcast(mine, group_src=size - 1)
    agree(True)


@both
def test_reduce_leaves_the_others_alone(async_op: bool, rank: int, size: int) -> None:
    """trap 26."""
    dst = size - 1
    mine = of_rank(rank, 4)
    done = ended(dist.reduce(mine, dst, async_op=async_op), async_op)
    expected = sum(of_rank(r, 4) for r in range(size)) if rank == dst else of_rank(rank, 4)
    agree(done and same(mine, expected), mine)


@both
def test_all_gather(async_op: bool, rank: int, size: int) -> None:
    outputs = [torch.full((2, 3), -1.0) for _ in range(size)]
    done = ended(dist.all_gather(outputs, of_rank(rank, 2, 3), async_op=async_op), async_op)
    agree(done and all(same(outputs[r], of_rank(r, 2, 3)) for r in range(size)), outputs)


@both
def test_all_gather_uneven(async_op: bool, rank: int, size: int) -> None:
    """trap 34: the ordinary list API."""
    outputs = [torch.full((r + 1,), -1.0) for r in range(size)]
    done = ended(dist.all_gather(outputs, of_rank(rank, rank + 1), async_op=async_op), async_op)
    agree(done and all(same(outputs[r], of_rank(r, r + 1)) for r in range(size)), outputs)


@both
def test_all_gather_coalesced(async_op: bool, rank: int, size: int) -> None:
    outputs = [[torch.full((2,), -1.0), torch.full((3, 2), -1.0)] for _ in range(size)]
    with pytest.warns(FutureWarning) if hasattr(dist.all_gather_coalesced, "__deprecated__") else contextlib.nullcontext():
        answer = dist.all_gather_coalesced(outputs, [of_rank(rank, 2), of_rank(rank, 3, 2)], async_op=async_op)
    if async_op:
        answer.wait()
    agree(all(same(outputs[r][0], of_rank(r, 2)) and same(outputs[r][1], of_rank(r, 3, 2)) for r in range(size)), outputs)


@both
@pytest.mark.parametrize("stacked", [False, True], ids=["concat", "stack"])
def test_all_gather_into_tensor(async_op: bool, stacked: bool, rank: int, size: int) -> None:
    """trap 35: both legal forms of the output."""
    gather = dist.all_gather_single if NEW_NAMES else dist.all_gather_into_tensor
    output = torch.full((size, 2, 3) if stacked else (size * 2, 3), -1.0)
    done = ended(gather(output, of_rank(rank, 2, 3), async_op=async_op), async_op)
    everybody = [of_rank(r, 2, 3) for r in range(size)]
    agree(done and same(output, torch.stack(everybody) if stacked else torch.cat(everybody)), output)


def test_old_names_of_the_flat_collectives(rank: int, size: int) -> None:
    with _ignored():
        output = torch.empty(size * 2)
        dist.all_gather_into_tensor(output, of_rank(rank, 2))
        mine = torch.empty(2)
        dist.reduce_scatter_tensor(mine, output)
        c10d._all_gather_base(output, of_rank(rank, 2))
        c10d._reduce_scatter_base(mine, output)
    agree(same(mine, of_rank(rank, 2) * size), mine)


def test_all_gather_into_tensor_in_place(rank: int, size: int) -> None:
    """trap 35: FSDP hands in a slice of the output."""
    gather = dist.all_gather_single if NEW_NAMES else dist.all_gather_into_tensor
    output = torch.full((size, 4), -1.0)
    output[rank] = of_rank(rank, 4)
    gather(output.view(-1), output[rank])
    agree(same(output, torch.stack([of_rank(r, 4) for r in range(size)])), output)


@both
def test_gather(async_op: bool, rank: int, size: int) -> None:
    dst = size - 1
    outputs = [torch.full((r + 1,), -1.0) for r in range(size)] if rank == dst else None
    done = ended(dist.gather(of_rank(rank, rank + 1), outputs, dst, async_op=async_op), async_op)
    right = outputs is None or all(same(outputs[r], of_rank(r, r + 1)) for r in range(size))
    agree(done and right, outputs)


def test_gather_arguments(rank: int, size: int) -> None:
    """trap 5."""
    list_ = [torch.empty(1) for _ in range(size)]
    with pytest.raises(ValueError, match="gather_list"):
        dist.gather(torch.ones(1), None if rank == 0 else list_, dst=0)
    with pytest.raises(ValueError, match="scatter_list"):
        dist.scatter(torch.ones(1), None if rank == 0 else list_, src=0)
    agree(True)


if hasattr(dist, "gather_single"):  # torch >= 2.14

    @both
    def test_gather_single(async_op: bool, rank: int, size: int) -> None:
        output = torch.full((size * 2, 3), -1.0) if rank == 0 else None
        done = ended(dist.gather_single(of_rank(rank, 2, 3), output, dst=0, async_op=async_op), async_op)
        right = output is None or same(output, torch.cat([of_rank(r, 2, 3) for r in range(size)]))
        agree(done and right, output)


@both
def test_scatter(async_op: bool, rank: int, size: int) -> None:
    src = size - 1
    inputs = [of_rank(r, r + 2) + 3 for r in range(size)] if rank == src else None
    mine = torch.full((rank + 2,), -1.0)
    done = ended(dist.scatter(mine, inputs, src, async_op=async_op), async_op)
    agree(done and same(mine, of_rank(rank, rank + 2) + 3), mine)


@both
def test_reduce_scatter(async_op: bool, rank: int, size: int) -> None:
    """Rank r's block has r + 1 elements (trap 38)."""
    inputs = [of_rank(rank, r + 1) * (r + 1) for r in range(size)]
    mine = torch.full((rank + 1,), -1.0)
    done = ended(dist.reduce_scatter(mine, inputs, async_op=async_op), async_op)
    agree(done and same(mine, sum(of_rank(r, rank + 1) * (rank + 1) for r in range(size))), mine)


@both
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_reduce_scatter_tensor(op: str, async_op: bool, rank: int, size: int) -> None:
    """AVG is not optional: FSDP2 on the CPU uses it (trap 33a)."""
    scatter = dist.reduce_scatter_single if NEW_NAMES else dist.reduce_scatter_tensor
    mine = torch.full((2, 3), -1.0)
    done = ended(scatter(mine, of_rank(rank, size * 2, 3), getattr(dist.ReduceOp, op), async_op=async_op), async_op)
    blocks = torch.stack([of_rank(r, size * 2, 3)[rank * 2 : rank * 2 + 2] for r in range(size)])
    expected = {"SUM": blocks.sum(0), "AVG": blocks.mean(0), "MAX": blocks.amax(0)}[op]
    agree(done and torch.allclose(mine, expected), mine)


@both
def test_all_to_all(async_op: bool, rank: int, size: int) -> None:
    """Rank s sends s + 1 elements to each: uneven lists (trap 37)."""
    inputs = [of_rank(rank, rank + 1) * 10 + r for r in range(size)]
    outputs = [torch.full((r + 1,), -1.0) for r in range(size)]
    done = ended(dist.all_to_all(outputs, inputs, async_op=async_op), async_op)
    agree(done and all(same(outputs[r], of_rank(r, r + 1) * 10 + rank) for r in range(size)), outputs)


@both
def test_all_to_all_single(async_op: bool, rank: int, size: int) -> None:
    mine = of_rank(rank, size, 3) * 10
    output = torch.full_like(mine, -1.0)
    done = ended(dist.all_to_all_single(output, mine, async_op=async_op), async_op)
    agree(done and same(output, torch.stack([of_rank(r, size, 3)[rank] * 10 for r in range(size)])), output)


@both
def test_all_to_all_single_splits(async_op: bool, rank: int, size: int) -> None:
    """Rows of dim 0, zero allowed: rank s sends s rows to every other rank (trap 37)."""
    sends = [rank] * size
    receives = list(range(size))
    mine = of_rank(rank, rank * size, 2)
    output = torch.full((sum(receives), 2), -1.0)
    done = ended(dist.all_to_all_single(output, mine, receives, sends, async_op=async_op), async_op)
    expected = [of_rank(r, r * size, 2)[rank * r : rank * r + r] for r in range(size)]
    agree(done and same(output, torch.cat(expected)), output)


@both
def test_barrier(async_op: bool, rank: int) -> None:
    first = ended(dist.barrier(async_op=async_op), async_op)
    second = ended(dist.barrier(async_op=async_op, device_ids=[0]), async_op)  # trap 8
    third = ended(dist.barrier(async_op=async_op, timeout=timedelta(seconds=20)), async_op) if _barrier_timeout() else True
    agree(first and second and third)


def test_monitored_barrier(rank: int) -> None:
    """trap 61: torch <= 2.13 lets it through for gloo only; from 2.14 on it reaches us."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    else:
        with pytest.raises(ValueError, match="GLOO"):
            dist.monitored_barrier()
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))  # type: ignore[union-attr]
    agree(True)


def _barrier_timeout() -> bool:
    return "timeout" in inspect.signature(dist.barrier).parameters


@contextlib.contextmanager
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
