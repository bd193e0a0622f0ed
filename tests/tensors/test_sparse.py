"""all_reduce of sparse tensors: the dense sum, whatever places each rank holds, the same bits on every rank."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from mpicoll.errors import UnsupportedReduction
from tests.support import agree, everyone

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)", "ignore:ComplexHalf"),
]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def of_rank(rank: int, dtype: torch.dtype = torch.float32, hybrid: bool = True) -> Tensor:
    """Rank r has r + 2 values in a (7, 3) tensor, one place twice; rank 2 has none. Hybrid: whole rows, else single elements."""
    count = 0 if rank == 2 else rank + 2
    rows = (torch.arange(count) * 3 + rank) % 7
    rows[-1:] = rows[:1]
    if hybrid:
        values = (torch.arange(count * 3).view(count, 3) + rank) % 4
        return torch.sparse_coo_tensor(rows.view(1, -1), values.to(dtype), (7, 3))
    columns = torch.arange(count) % 3
    return torch.sparse_coo_tensor(torch.stack([rows, columns]), ((torch.arange(count) + rank) % 4).to(dtype), (7, 3))


def dense_sum(size: int, dtype: torch.dtype, hybrid: bool) -> Tensor:
    wide = torch.int64 if dtype == torch.bool else torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack([of_rank(r, dtype, hybrid).to(wide).to_dense() for r in range(size)]).sum(0)


def bits(tensor: Tensor) -> tuple[Any, ...]:
    """Everything that could differ between ranks."""
    values = tensor.values().contiguous()
    return tensor.indices().tolist(), values.view(torch.uint8).tolist(), values.dtype, tensor.shape


@pytest.mark.parametrize("door", [dist, torch.distributed], ids=["mpicoll", "torch"])
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("hybrid", [True, False], ids=["rows", "elements"])
def test_sum_and_mean(hybrid: bool, async_op: bool, door: Any, rank: int, size: int) -> None:
    wrong = []
    for dtype, op in itertools.product(DTYPES, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        if dtype.is_complex and door is torch.distributed:
            continue  # of which torch hands on a view as real numbers, with places of its own
        if op == dist.ReduceOp.AVG and not (dtype.is_floating_point or dtype.is_complex):
            continue  # in the next test
        mine = of_rank(rank, dtype, hybrid)
        work = door.all_reduce(mine, op, async_op=async_op)
        if async_op:
            assert work.get_future().wait()[0] is mine
        total = dense_sum(size, dtype, hybrid)
        expected = (total if op == dist.ReduceOp.SUM else total / size).to(dtype)
        same = all(theirs == bits(mine) for theirs in everyone(bits(mine)))
        if not (same and mine.is_coalesced() and mine.dtype == dtype and torch.equal(mine.to_dense(), expected)):
            wrong.append((dtype, op, mine, expected))
    agree(not wrong, wrong)


def test_mean_of_integers_is_truncated(rank: int, size: int) -> None:
    for dtype in (torch.int8, torch.int64):
        mine = torch.sparse_coo_tensor([[0, 2]], torch.tensor([-7 - rank, 7], dtype=dtype), (3,))
        dist.all_reduce(mine, dist.ReduceOp.AVG)
        first = -(sum(7 + r for r in range(size)) // size)
        agree(torch.equal(mine.to_dense(), torch.tensor([first, 0, 7], dtype=dtype)), mine)


def test_halves_are_rounded_once(rank: int, size: int) -> None:
    """2048 + 1 + 1 ... in fp16 stays 2048 if every addition is rounded."""
    mine = torch.sparse_coo_tensor([[1, 1]], torch.tensor([2048.0 if rank == 0 else 1.0, 1.0]).half(), (3,))
    dist.all_reduce(mine)
    expected = torch.tensor([0.0, 2048.0 + 2 * size - 1, 0.0]).half()
    agree(torch.equal(mine.to_dense(), expected), mine)


def test_in_place_as_autograd_sees_it(rank: int, size: int) -> None:
    """A leaf that requires grad, and an inference tensor; the version counter goes up."""
    leaf = of_rank(rank).requires_grad_()
    version = leaf._version
    dist.all_reduce(leaf)
    with torch.inference_mode():
        inferred = of_rank(rank)
    dist.all_reduce(inferred)
    expected = dense_sum(size, torch.float32, True).float()
    right = all(torch.equal(t.detach().to_dense(), expected) for t in (leaf, inferred))
    agree(right and leaf._version > version and leaf.requires_grad, (leaf, inferred))


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_shapes_that_differ(async_op: bool, rank: int, size: int) -> None:
    """All ranks hear it, and the group goes on."""
    mine = of_rank(rank) if rank != size - 1 else torch.sparse_coo_tensor([[1]], torch.ones(1, 4), (9, 4))
    said = ""
    try:
        work = dist.all_reduce(mine, async_op=async_op)
        if work is not None:
            work.wait()
    except ValueError as error:
        said = str(error)
    dist.all_reduce(after := torch.ones(1))
    expected = f"rank 0 has torch.float32 of shape (7, 3) with 1 sparse dimensions, rank {size - 1} has"
    agree((expected in said) == (size > 1) and after.item() == size, said)


def test_what_has_no_right_answer(rank: int, size: int) -> None:
    """The places that a rank does not hold are zeros, which MAX would have to know."""
    refused = 0
    for dtype, op in (
        (torch.float32, dist.ReduceOp.MAX),
        (torch.float32, dist.ReduceOp.PRODUCT),
        (torch.bool, dist.ReduceOp.AVG),
        (torch.uint16, dist.ReduceOp.SUM),
        (torch.complex32, dist.ReduceOp.SUM),
    ):
        mine = torch.sparse_coo_tensor([[0, 1]], torch.ones(2).to(dtype), (3,))
        with pytest.raises(UnsupportedReduction, match="all_reduce"):
            dist.all_reduce(mine, op)
        refused += 1
    dist.all_reduce(after := torch.ones(1))
    agree(refused == 5 and after.item() == size, refused)


def test_profiler_counts_its_bytes(tmp_path: Path, rank: int, size: int) -> None:
    """A sparse tensor has no nbytes of torch's."""
    from torch.profiler import ProfilerActivity, profile

    mine = of_rank(rank)
    nbytes = mine._indices().nbytes + mine._values().nbytes
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        dist.all_reduce(mine)
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [event["args"]["In msg bytes"] for event in events if event.get("name") == "record_mpi_comms"]
    agree(found == [nbytes] and any(event.get("name") == "mpi:sparse_all_reduce" for event in events), found)
