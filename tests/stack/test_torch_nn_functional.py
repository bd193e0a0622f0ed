"""torch.distributed.nn.functional on MPI: values, and gradients through every function by gradcheck (gradients.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnf
from torch import Tensor

from tests.stack.record import refused_alike
from tests.support import agree
from tests.support.gradients import check, of_ranks

SECTION = "Functional collectives and torch.compile"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*will be deprecated:FutureWarning"),
]

Function = Callable[[Tensor, int, int], Tensor | Sequence[Tensor]]


def reduce(x: Tensor, rank: int, size: int, group: Any = None) -> Tensor:
    """The result on dst; the other ranks' tensors mean nothing, but they take part in backward."""
    last = dist.get_process_group_ranks(group or dist.group.WORLD)[-1]
    reduced = dnf.reduce(x * x, last, group=group)
    return reduced if rank == last else reduced * 0


def all_to_all_single(x: Tensor, rank: int, size: int) -> Tensor:
    """Rank i sends (i + j) % 3 rows to rank j."""
    rows = [[(i + j) % 3 for j in range(size)] for i in range(size)]
    sent, received = rows[rank], [rows[i][rank] for i in range(size)]
    output = torch.empty(sum(received), 1, dtype=x.dtype)
    return dnf.all_to_all_single(output, x[: sum(sent)] ** 2, received, sent)  # type: ignore[no-any-return]


def all_to_all(x: Tensor, rank: int, size: int) -> Sequence[Tensor]:
    """Rank i sends i % 2 + 1 elements to each."""
    outputs = [torch.empty(i % 2 + 1, dtype=x.dtype) for i in range(size)]
    return dnf.all_to_all(outputs, [x[i, : rank % 2 + 1] ** 2 for i in range(size)])  # type: ignore[no-any-return]


FUNCTIONS: dict[str, Function] = {
    "broadcast": lambda x, r, n: dnf.broadcast(x * x, n - 1),
    "gather": lambda x, r, n: dnf.gather(x * x, n - 1),
    "scatter": lambda x, r, n: dnf.scatter(list((x * x).expand(n, *x.shape) * (r + 1)), n - 1),
    "reduce": reduce,
    "reduce_scatter": lambda x, r, n: dnf.reduce_scatter(torch.empty_like(x), [x * x * (i + r + 1) for i in range(n)]),
    "all_gather": lambda x, r, n: dnf.all_gather(x * x),
    "all_to_all": lambda x, r, n: dnf.all_to_all([torch.empty_like(x)] * 1 + [torch.empty_like(x) for _ in range(n - 1)],
                                                 [x * x * (i + r + 1) for i in range(n)]),
    "all_reduce": lambda x, r, n: dnf.all_reduce(x * x),
    "all_reduce avg": lambda x, r, n: dnf.all_reduce(x * x, op=dist.ReduceOp.AVG),
}  # fmt: skip
UNEVEN: dict[str, Function] = {"all_to_all_single": all_to_all_single, "all_to_all": all_to_all}


@pytest.mark.feature(
    "nn.functional, by gradcheck: broadcast, gather, scatter, reduce, reduce_scatter, all_gather, all_to_all, all_reduce"
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients(function: str, rank: int, size: int) -> None:
    check(lambda x: FUNCTIONS[function](x, rank, size), of_ranks(3))


@pytest.mark.feature("nn.functional: gradients of the gradients, by gradgradcheck")
@pytest.mark.parametrize("function", ["broadcast", "scatter", "reduce", "reduce_scatter", "all_gather", "all_reduce"])
def test_second_gradients(function: str, rank: int, size: int) -> None:
    """torch builds each backward of the functions themselves, which are differentiable again."""
    check(lambda x: FUNCTIONS[function](x, rank, size), of_ranks(1), twice=True)


@pytest.mark.feature("nn.functional: gradients by gradcheck: all_to_all and all_to_all_single of uneven sizes")
@pytest.mark.parametrize("function", UNEVEN)
def test_uneven(function: str, rank: int, size: int) -> None:
    """The backward has the sizes the other way round."""
    shape = (size, 2) if function == "all_to_all" else (size + 2, 1)
    check(lambda x: UNEVEN[function](x, rank, size), of_ranks(*shape))


def values(function: str, squares: Tensor, rank: int, size: int) -> list[Tensor]:
    """What ``rank`` gets, from everybody's squares."""
    last, factors = size - 1, [r + 1 for r in range(size)]
    if function == "broadcast":
        return [squares[last]]
    if function == "gather":
        return list(squares) if rank == last else [torch.zeros_like(square) for square in squares]
    if function == "scatter":
        return [squares[last] * size]
    if function == "reduce":
        return [squares.sum(0) * (rank == last)]
    if function == "reduce_scatter":
        return [sum(square * (rank + factor) for square, factor in zip(squares, factors, strict=True))]  # type: ignore[list-item]
    if function == "all_gather":
        return list(squares)
    if function == "all_to_all":
        return [square * (rank + factor) for square, factor in zip(squares, factors, strict=True)]
    return [squares.mean(0) if "avg" in function else squares.sum(0)]


@pytest.mark.feature("nn.functional: values; strided inputs and gradients")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values(function: str, rank: int, size: int) -> None:
    """Results for a transposed input, whose values stay; the gradient of a sum, which is one expanded element."""
    whole = of_ranks(3, 2).transpose(1, 2).requires_grad_()
    mine = whole.detach()[rank].requires_grad_()
    kept = mine.detach().clone()
    got = FUNCTIONS[function](mine, rank, size)
    got = [got] if isinstance(got, Tensor) else list(got)
    expected = values(function, whole * whole, rank, size)
    right = all(torch.allclose(g, e) and g.shape == e.shape for g, e in zip(got, expected, strict=True))
    agree(right and torch.equal(mine.detach(), kept), (got, expected))
    sum(g.sum() for g in got).backward()  # type: ignore[union-attr]
    total = sum(e.sum() for r in range(size) for e in values(function, whole * whole, r, size))
    (gradient,) = torch.autograd.grad(total, whole)  # type: ignore[arg-type]
    agree(torch.allclose(mine.grad, gradient[rank]), (mine.grad, gradient[rank]))  # type: ignore[arg-type]


# One tensor each: `check` wants as many on each rank, and of 3 ranks the groups have 2 and 1.
SUBGROUPS: dict[str, Callable[[Tensor, Any, list[int]], Tensor]] = {
    "all_reduce": lambda x, group, ranks: dnf.all_reduce(x * x, group=group),
    "all_gather": lambda x, group, ranks: torch.stack(list(dnf.all_gather(x * x, group=group))),
    "broadcast": lambda x, group, ranks: dnf.broadcast(x * x, ranks[-1], group=group),
    "reduce": lambda x, group, ranks: reduce(x, dist.get_rank(), 0, group),
    "all_to_all": lambda x, group, ranks: torch.stack(
        list(dnf.all_to_all([torch.empty_like(x) for _ in ranks], [x * x] * len(ranks), group=group))
    ),
}
BROADCAST_RIGHT = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)


@pytest.mark.feature("nn.functional: in a subgroup")
@pytest.mark.parametrize("function", SUBGROUPS)
def test_subgroups(function: str, rank: int, size: int) -> None:
    """Even and odd ranks each for themselves; torch < 2.15 forgets the gradient of broadcast's src where its rank differs."""
    ranks = list(range(rank % 2, size, 2))
    group = dist.new_group(ranks, use_local_synchronization=True)
    if function != "broadcast" or BROADCAST_RIGHT:
        check(lambda x: SUBGROUPS[function](x, group, ranks), of_ranks(2))
    else:
        beside = dist.new_group(ranks, use_local_synchronization=True, backend="gloo")
        gradients = []
        for one in (group, beside):
            x = of_ranks(2)[rank].requires_grad_()
            SUBGROUPS[function](x, one, ranks).sum().backward()
            gradients.append(x.grad)
        agree(torch.equal(*gradients), gradients)  # type: ignore[arg-type]
        dist.destroy_process_group(beside)
    dist.destroy_process_group(group)


@pytest.mark.feature("nn.functional: all_reduce MAX, MIN, PRODUCT as on Gloo")
@pytest.mark.parametrize("op", ["MAX", "MIN", "PRODUCT"])
def test_other_reductions(op: str, rank: int, size: int) -> None:
    """torch reduces the gradients by the same operation, which is not the derivative; on MPI it is at least the same numbers."""
    beside = dist.new_group(backend="gloo")
    said = []
    for group in (dist.group.WORLD, beside):
        x = of_ranks(4)[rank].requires_grad_()
        y = dnf.all_reduce(x * x, getattr(dist.ReduceOp, op), group=group)
        (y * torch.arange(1.0, 5.0) * (rank + 1)).sum().backward()
        said.append((y.detach(), x.grad))
    agree(all(torch.allclose(a, b) for a, b in zip(*said, strict=True)), said)  # type: ignore[arg-type]
    dist.destroy_process_group(beside)


@pytest.mark.feature("nn.functional: _all_gather_base (values)")
def test_all_gather_base(rank: int, size: int, request: pytest.FixtureRequest) -> None:
    """Its values; its backward is written for NCCL alone."""
    inputs = of_ranks(3)
    output = dnf._all_gather_base(torch.empty(3 * size, dtype=torch.float64), inputs[rank])
    agree(torch.equal(output, inputs.flatten()), output)

    def backward(group: Any) -> None:
        x = inputs[rank].clone().requires_grad_()
        dnf._all_gather_base(torch.empty(3 * size, dtype=torch.float64), x, group=group).sum().backward()

    refused_alike("backward of torch.distributed.nn.functional._all_gather_base", backward, request.node, RuntimeError)
