"""Reductions other than SUM: AVG, which scales a sum, and PRODUCT, MIN and MAX, whose gradients depend on the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpicoll._base.errors import UnsupportedReduction
from mpicoll._tensors import buffers, checks, reductions
from mpicoll._tensors.reductions import Op
from mpicoll.nn import linear_collectives
from mpicoll.nn.linear import Linear, apply
from mpicoll.nn.linear_collectives import Shapes
from mpicoll.nn.preflight import Preflight

# Sums of half precision are accumulated in float32 and rounded once, as in all_reduce itself.
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "PRODUCT": lambda stacked: widened(stacked).prod(0).to(stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}


def checked_name(operation: str, tensor: Tensor, op: Op) -> str:
    """Returns the name of the op. Raises UnsupportedReduction if it is PREMUL_SUM, or has no right answer for the dtype."""
    checks.movable(operation, tensor)
    reductions.lookup(operation, tensor.dtype, op)
    name = next(name for name, value in reductions.OPS.items() if op == value)
    if name == "PREMUL_SUM":
        raise UnsupportedReduction(f"{operation}: PREMUL_SUM has no gradient here; multiply the tensor by the factor and use SUM")
    return name


def is_discrete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))


def reduced(
    name: str, tensor: Tensor, ranks: Preflight, reduce: Callable[[Op], Linear], gather: Callable[[Shapes], Linear]
) -> Tensor:
    """Returns the reduction by the op of this name (collective).

    PRODUCT, MIN and MAX: ranks swap shares of the elements, and torch's own kernel reduces them. So ties, zeros and NaN come out
    as in torch, in the value and in gradients of any order, with memory for two tensors instead of one for each rank.

    Args:
        reduce: Makes the map to the reduction by an op without gradient, or SUM.
        gather: Makes the map from tensors of these shapes to all of them.
    """
    if name == "SUM" or is_discrete(tensor):
        return apply(reduce(reductions.OPS[name]), [tensor], ranks.requires_grad)[0]
    if name == "AVG":
        (total,) = apply(reduce(reductions.OPS["SUM"]), [widened(tensor)], ranks.requires_grad)
        return (total / ranks.size).to(tensor.dtype)
    shapes = tuple(tuple(part.shape) for part in tensor.detach().reshape(-1).tensor_split(ranks.size))
    counts = tuple(count for (count,) in shapes)
    own = counts[ranks.rank]
    swap = linear_collectives.all_to_all_single(ranks.group, (tensor.numel(),), (own * ranks.size,), counts, (own,) * ranks.size)
    (stacked,) = apply(swap, [tensor.reshape(-1)], ranks.requires_grad)
    shares = apply(gather(shapes), [REDUCE[name](stacked.view(ranks.size, own))], ranks.requires_grad)
    return torch.cat(shares).view(tensor.shape)


class Deliver(torch.autograd.Function):
    """Copies a result into the memory that the caller gave for it. ``box``: a list of that tensor, so that it is no input."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, box: list[Tensor]) -> Tensor:
        buffers.copy_into(box[0], result)
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
