"""Gradients through torch.distributed._functional_collectives on MPI, by gradcheck of the function of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.support import agree
from tests.support.gradients import check, of_ranks

SECTION = "Functional collectives and torch.compile"

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)
all_gather_coalesced = getattr(funcol, "all_gather_single_coalesced", funcol.all_gather_into_tensor_coalesced)
reduce_scatter_coalesced = getattr(funcol, "reduce_scatter_single_coalesced", funcol.reduce_scatter_tensor_coalesced)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient  # right for one rank, or for a loss that only rank 0 counts


@pytest.mark.min_ranks(2)
def test_the_check_finds_a_wrong_gradient() -> None:
    """An all_reduce whose backward forgets the other ranks."""
    with pytest.raises(pytest.fail.Exception, match="Jacobian mismatch"):
        check(_Wrong.apply, of_ranks(2))


GRADIENTS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "all_reduce": lambda x, r, n: funcol.all_reduce(x * x, "sum", dist.group.WORLD),
    "all_gather": lambda x, r, n: all_gather(x * x, 0, dist.group.WORLD),
    "all_gather along dim 1": lambda x, r, n: all_gather(x * x, 1, dist.group.WORLD),
    "reduce_scatter": lambda x, r, n: reduce_scatter(x * x, "sum", 0, dist.group.WORLD),
    "reduce_scatter along dim 1": lambda x, r, n: reduce_scatter(x * x, "sum", 1, dist.group.WORLD),
    "all_to_all_single": lambda x, r, n: funcol.all_to_all_single(x * x, None, None, dist.group.WORLD),
    "permute_tensor": lambda x, r, n: funcol.permute_tensor((x * x).flatten(), [(i + 1) % n for i in range(n)], dist.group.WORLD),
    "all_gather_tensor_autograd": lambda x, r, n: funcol.all_gather_tensor_autograd(x * x, 0, dist.group.WORLD),
    "reduce_scatter_tensor_autograd": lambda x, r, n: funcol.reduce_scatter_tensor_autograd(x * x, "sum", 0, dist.group.WORLD),
    "all_to_all_single_autograd": lambda x, r, n: funcol.all_to_all_single_autograd(x * x, None, None, dist.group.WORLD),
    "used twice": lambda x, r, n: (y := funcol.all_reduce(x, "sum", dist.group.WORLD)) * (r + 1) + y * x,
    "one after the other": lambda x, r, n: all_gather(
        reduce_scatter(x * x, "sum", 0, dist.group.WORLD) * (r + 1), 0, dist.group.WORLD
    ),
}


@pytest.mark.feature("functional, by gradcheck: all_reduce, all_gather, reduce_scatter, all_to_all, permute, *_autograd")
@pytest.mark.parametrize("function", GRADIENTS)
def test_gradients(function: str, rank: int, size: int) -> None:
    shape = (2, size) if "dim 1" in function else (size,)
    check(lambda x: GRADIENTS[function](x, rank, size), of_ranks(*shape))


@pytest.mark.feature("functional, by gradcheck: all_reduce, all_gather, reduce_scatter, all_to_all, permute, *_autograd")
def test_uneven_all_to_all(rank: int, size: int) -> None:
    """Rank i sends (i + j) % 3 rows to rank j: the backward has the splits the other way round."""
    rows = [[(i + j) % 3 for j in range(size)] for i in range(size)]
    sent, received = rows[rank], [rows[i][rank] for i in range(size)]

    def function(x: Tensor) -> Tensor:
        return funcol.all_to_all_single(x[: sum(sent)] ** 2, received, sent, dist.group.WORLD)

    check(function, of_ranks(2 * size, 1))


@pytest.mark.feature("functional, by gradcheck: all_reduce, all_gather, reduce_scatter, all_to_all, permute, *_autograd")
def test_complex_all_reduce(rank: int) -> None:
    check(lambda x: funcol.all_reduce(x * x, "sum", dist.group.WORLD), of_ranks(2, dtype=torch.complex128))


@pytest.mark.feature("functional, by gradcheck: all_reduce, all_gather, reduce_scatter, all_to_all, permute, *_autograd")
def test_gradients_of_a_mesh_dimension(rank: int, size: int) -> None:
    """Each row of a mesh for itself; the other rows' inputs have no influence."""
    mesh = init_device_mesh("cpu", (size // 2, 2) if size % 2 == 0 else (1, size))
    check(lambda x: all_gather(x * x, 0, (mesh, 1)) * (rank + 1), of_ranks(2))
    check(lambda x: funcol.all_reduce(x * x, "sum", (mesh, 0)) * (rank + 1), of_ranks(2))


@pytest.mark.feature("functional: gradients by gradcheck: *_coalesced")
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_coalesced(kind: str, size: int) -> None:
    """Two tensors of different shapes as one operation, forward and backward."""
    world = dist.group.WORLD

    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        if kind == "all_reduce":
            return funcol.all_reduce_coalesced([x * x, y * x[0, 0]], "sum", world)
        if kind == "all_gather":
            return all_gather_coalesced([x * x, y * x[0, 0]], world)  # type: ignore[no-any-return]
        return reduce_scatter_coalesced([x * x, y * x[0, 0]], "sum", [0, 0], world)  # type: ignore[no-any-return]

    check(function, of_ranks(size, 2), of_ranks(size, seed=1))


@pytest.mark.feature("functional, by gradcheck: all_reduce avg, min, max, premul_sum")
@pytest.mark.skipif(VERSION < (2, 15), reason="needs torch >= 2.15")
@pytest.mark.parametrize("op", ["avg", "min", "max", "premul_sum"])
def test_other_reductions(op: str) -> None:
    """The extremum's gradient goes to the rank that has it."""
    reduction = dist._make_nccl_premul_sum(0.5) if op == "premul_sum" else op
    check(lambda x: funcol.all_reduce(x * x, reduction, dist.group.WORLD), of_ranks(3))
    check(lambda x: funcol.all_reduce_coalesced([x * x, x], reduction, dist.group.WORLD), of_ranks(3))


@pytest.mark.feature("functional, by gradcheck: all_reduce avg, min, max, premul_sum")
@pytest.mark.skipif(VERSION < (2, 15), reason="needs torch >= 2.15")
def test_ties_share_the_gradient(size: int) -> None:
    """All ranks hold the maximum: each gets its share of the sum of all ranks' gradients."""
    x = torch.ones(2, requires_grad=True)
    funcol.all_reduce(x, "max", dist.group.WORLD).sum().backward()
    agree(torch.allclose(x.grad, torch.ones(2)), x.grad)  # type: ignore[arg-type]


@pytest.mark.feature("functional, by gradcheck: all_reduce, all_gather, reduce_scatter, all_to_all, permute, *_autograd")
def test_a_gradient_that_lies_otherwise(rank: int, size: int) -> None:
    """What backward receives may be expanded (of a sum) or transposed; the values count."""
    for seen in (lambda y: y.sum(), lambda y: (y.t() * torch.arange(y.numel(), dtype=y.dtype).view_as(y.t())).sum()):
        for function in ("all_reduce", "all_gather along dim 1", "reduce_scatter along dim 1", "all_to_all_single"):
            x = of_ranks(size, size)[rank].requires_grad_()
            seen(funcol.wait_tensor(GRADIENTS[function](x, rank, size))).backward()
            whole = of_ranks(size, size).requires_grad_()
            total = sum(seen(one_process(function, whole, r, size)) for r in range(size))
            expected = torch.autograd.grad(total, whole)[0][rank]  # type: ignore[arg-type]
            agree(torch.allclose(x.grad, expected), (function, x.grad, expected))  # type: ignore[arg-type]


def one_process(function: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """What ``rank`` gets, from the inputs of all."""
    squares = whole * whole
    if function == "all_reduce":
        return squares.sum(0)
    if function == "all_gather along dim 1":
        return torch.cat(list(squares), 1)
    if function == "reduce_scatter along dim 1":
        return squares.sum(0).chunk(size, 1)[rank]
    return torch.stack([square[rank] for square in squares])
