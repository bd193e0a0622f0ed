"""reduce_scatter encodes 8 and 16 bits some elements at a time: as int32 or float32 a whole input took four times its memory."""

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from mpicoll._algorithms.plans import Plan
from mpicoll._host import collectives
from tests.support import agree

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.min_ranks(2)]

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX


@pytest.mark.parametrize("sizes", ["even", "uneven", "one is empty"])
@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.int8, SUM), (torch.uint8, AVG), (torch.int16, SUM), (torch.uint16, AVG), (torch.bfloat16, MAX), (torch.bool, SUM)],
    ids=str,
)
def test_the_encoded_buffers_are_small(
    dtype: torch.dtype, op: dist.ReduceOp.RedOpType, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = [{"even": 500, "uneven": 500 + 77 * i, "one is empty": 500 * (i > 0)}[sizes] for i in range(size)]

    def inputs(of: int) -> list[Tensor]:
        return [((torch.arange(count) * 3 + of + i) % 11).to(dtype) for i, count in enumerate(counts)]

    def output() -> Tensor:
        return torch.empty(counts[rank], dtype=dtype)

    whole, pieced = output(), output()
    dist.reduce_scatter(whole, inputs(rank), op)
    encoded: list[int] = []
    encode = Plan.encode
    monkeypatch.setattr(Plan, "encode", lambda plan, memory: encoded.append(memory.numel()) or encode(plan, memory))
    monkeypatch.setattr(collectives, "ENCODED", 60)
    dist.reduce_scatter(pieced, inputs(rank), op)
    monkeypatch.undo()
    agree(len(encoded) > 5 and max(encoded) <= 60, f"elements encoded at a time: {encoded}")
    parts = torch.stack([inputs(of)[rank].to(torch.int64) for of in range(size)])
    expected = {SUM: parts.sum(0), AVG: parts.sum(0) // size, MAX: parts.amax(0)}[op].to(dtype)
    agree(torch.equal(pieced, whole) and torch.equal(pieced, expected), f"{pieced}, whole {whole}, expected {expected}")


def test_the_blocks_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.arange(1000 * size).remainder(5).to(torch.int8) + rank
    monkeypatch.setattr(collectives, "ENCODED", 64)
    output = tensor[rank * 1000 : (rank + 1) * 1000]  # it overlaps the input
    expected = sum((torch.arange(1000 * size).remainder(5).to(torch.int8) + of).view(size, -1)[rank] for of in range(size))
    dist.reduce_scatter_single(output, tensor)
    agree(torch.equal(output, torch.as_tensor(expected)), f"{output}")
