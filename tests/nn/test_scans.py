"""mpicoll.nn.scan and exscan: values and gradients of prefix sums, beside one process that has the tensors of all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll.errors import UnsupportedReduction
from mpicoll.nn import functional as nnf
from tests.nn.domains import refused_alike
from tests.support import agree

SECTION = "Autograd in the mpicoll API"
SCANS = {"scan": nnf.scan, "exscan": nnf.exscan}
both = pytest.mark.parametrize("name", SCANS)


def prefixes(name: str, whole: Tensor) -> Tensor:
    """Row r: what rank r gets, if row i is the tensor of rank i."""
    return whole.cumsum(0) if name == "scan" else torch.cat([torch.zeros_like(whole[:1]), whole[:-1].cumsum(0)])


@pytest.mark.feature("mpicoll.nn.functional: values, any dtype and strides")
@both
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_process_finds_the_same(name: str, shape: tuple[int, ...], dtype: torch.dtype, rank: int, size: int) -> None:
    """Small whole numbers, whose sums have no rounding error."""
    whole, weights = (torch.randint(-5, 6, (size, *shape)).to(dtype) for _ in range(2))
    alone = whole.clone().requires_grad_()
    expected = prefixes(name, alone)
    (expected * weights).sum().backward()
    x = whole[rank].clone().requires_grad_()
    y = SCANS[name](x)
    (y * weights[rank]).sum().backward()
    agree(y.dtype == dtype and torch.equal(y, expected[rank]) and torch.equal(x.grad, alone.grad[rank]), f"{y} {x.grad}")


@pytest.mark.feature("mpicoll.nn.functional: values, any dtype and strides")
@both
def test_integers_have_values(name: str, rank: int, size: int) -> None:
    whole = torch.arange(2 * size).view(size, 2)
    y = SCANS[name](whole[rank])
    agree(torch.equal(y, prefixes(name, whole)[rank]) and not y.requires_grad, y)


@pytest.mark.feature("mpicoll.nn.functional: values, any dtype and strides")
@both
def test_a_gradient_loses_no_digits(name: str, rank: int, size: int) -> None:
    """Rank 0 has a gradient of 1e16. The sum of all gradients minus those of the ranks before would be 0 on the other ranks."""
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    y = SCANS[name](x)
    y.backward(torch.full_like(y, 1e16 if rank == 0 else 1.0))
    ones = size - 1 - rank + (name == "scan")
    agree(x.grad.item() == ones or (name == "scan" and rank == 0 and x.grad.item() >= 1e16), x.grad)


@pytest.mark.feature("mpicoll.nn.functional: groups whose ranks are not the world's")
@pytest.mark.min_ranks(3)
@both
def test_in_a_group_of_some_ranks(name: str, rank: int, size: int) -> None:
    group = dist.new_group(list(range(1, size)))
    right = True
    if rank > 0:
        x = torch.full((2,), float(rank), requires_grad=True)
        y = SCANS[name](x, group=group)
        y.sum().backward()
        ranks = range(1, rank + 1) if name == "scan" else range(1, rank)
        right = y.tolist() == [sum(ranks)] * 2 and x.grad.tolist() == [size - rank - (name == "exscan")] * 2
    agree(right)
    dist.destroy_process_group(group)


@pytest.mark.feature("mpicoll.nn.functional: ranks that do not fit together: one error, on every rank")
@both
def test_what_is_refused(name: str, rank: int, size: int) -> None:
    """On every rank, and the group works on."""
    x = torch.ones(2)
    with pytest.raises(UnsupportedReduction, match=f"{name}: MAX has no gradient here; use SUM, or mpicoll.{name}"):
        SCANS[name](x, ReduceOp.MAX)
    if size > 1:
        op = ReduceOp.AVG if rank == size - 1 else ReduceOp.SUM
        refused_alike([
            (lambda: SCANS[name](x[:1] if rank == size - 1 else x), f"ValueError: {name}: the ranks do not fit together"),
            (lambda: SCANS[name](x, op), f"rank {size - 1}: {name}: AVG has no gradient"),
        ])  # fmt: skip
    agree(SCANS[name](x).tolist() == [rank + (name == "scan")] * 2)
