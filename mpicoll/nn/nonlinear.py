"""Reductions other than SUM: AVG, which scales a sum, and PRODUCT, MIN and MAX, whose gradients depend on the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpicoll._tensors import buffers, checks, reductions
from mpicoll._tensors.reductions import Op
from mpicoll.errors import UnsupportedReduction
from mpicoll.nn import linear_collectives
from mpicoll.nn.linear import apply
from mpicoll.nn.linear_collectives import Shapes
from mpicoll.nn.preflight import Preflight

# Sums of half precision are accumulated in float32 and rounded once, as in all_reduce itself.
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def _product(stacked: Tensor) -> Tensor:
    return widened(stacked).prod(0).to(stacked.dtype)


REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "PRODUCT": _product,
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}


def checked_name(operation: str, tensor: Tensor, op: Op) -> str:
    """Returns the name of the op.

    Raises:
        UnsupportedReduction: PREMUL_SUM, or the dtype and the op have no right answer together.
    """
    checks.movable(operation, tensor)
    reductions.lookup(operation, tensor.dtype, op)
    name = next(name for name, value in reductions.OPS.items() if op == value)
    if name == "PREMUL_SUM":
        raise UnsupportedReduction(f"{operation}: PREMUL_SUM has no gradient here; multiply the tensor by the factor and use SUM")
    return name


def is_discrete(tensor: Tensor) -> bool:
    """Returns whether the dtype has no gradients."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def widened(tensor: Tensor) -> Tensor:
    """Converts half precision to single precision."""
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))


def averaged(summed: Callable[[Tensor], Tensor], tensor: Tensor, size: int) -> Tensor:
    """Returns the average, given a function that sums over the ranks."""
    return (summed(widened(tensor)) / size).to(tensor.dtype)


def reduced_share(name: str, tensor: Tensor, ranks: Preflight) -> tuple[Tensor, Shapes]:
    """Returns the reduction of this rank's share of the elements, and the shapes of all shares (collective).

    Ranks swap shares, and torch's own kernel reduces them. So ties, zeros and NaN come out as in torch, in the value and in
    gradients of any order, with memory for two tensors instead of one for each rank.
    """
    shapes = tuple(tuple(part.shape) for part in tensor.detach().reshape(-1).tensor_split(ranks.size))
    counts = tuple(count for (count,) in shapes)
    own = counts[ranks.rank]
    swap = linear_collectives.all_to_all_single(ranks.group, (tensor.numel(),), (own * ranks.size,), counts, (own,) * ranks.size)
    (stacked,) = apply(swap, [tensor.reshape(-1)], ranks.requires_grad)
    return REDUCE[name](stacked.view(ranks.size, own)), shapes


class Deliver(torch.autograd.Function):
    """Copies a result into the memory that the caller gave for it. ``box``: a list of that tensor, so that it is no input."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, box: list[Tensor]) -> Tensor:
        buffers.copy_into(box[0], result)
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
