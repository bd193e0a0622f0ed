"""Makes linear maps between ranks differentiable.

Moving data between ranks is a linear map of all ranks' tensors together. Its gradient is the adjoint map, which moves data, too:

    all_reduce SUM <-> itself           gather     <-> scatter             all_to_all <-> all_to_all, backwards
    broadcast      <-> reduce SUM       all_gather <-> reduce_scatter SUM  attach halo <-> accumulate halo
    scan SUM       <-> scan SUM in the opposite order of the ranks; exscan likewise

So each map knows its adjoint, and `apply` makes it differentiable any number of times. The gradient is that of the SUM of all
ranks' losses, as in torch.distributed.nn.functional: no rank's loss is divided by anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Linear:
    """A linear map of all ranks' tensors."""

    forward: Callable[..., Tensors]  # from this rank's input tensors to its output tensors (collective)
    adjoint: Callable[[], Linear]  # makes the map from the gradients of the outputs to those of the inputs


def apply(linear: Linear, tensors: Sequence[Tensor], requires_grad: bool) -> Tensors:
    """Returns the outputs of the map, differentiable (collective; its backward pass is, too).

    Args:
        requires_grad: Some rank's tensors require grad. Then the outputs do on every rank: a rank without them would not take
            part in the backward pass, and the others would wait for it.
    """
    needs_anchor = requires_grad and torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors)
    return _apply(linear, torch.empty(0, requires_grad=True, device="cpu") if needs_anchor else None, tensors)


def _apply(linear: Linear, anchor: Tensor | None, tensors: Sequence[Tensor]) -> Tensors:
    outputs: Tensors = _Apply.apply(linear, anchor, *tensors)  # type: ignore[no-untyped-call]
    return outputs[:-1]


# Note [Ties]
# The gradient of a gradient goes through the adjoint, and then through what the incoming gradients depend on. On a rank whose
# loss is linear they depend on nothing: its graph would end at the adjoint, while the other ranks go on to the original map, a
# collective, and wait. So each map has one more output, a tie: a tensor without elements. In a backward pass with create_graph
# the adjoint depends on the tie, so that every rank that goes through the adjoint goes through the original map as well.


class _Apply(torch.autograd.Function):
    """``anchor``: a tensor without elements that the outputs depend on; or None."""

    @staticmethod
    def forward(ctx: Any, linear: Linear, anchor: Tensor | None, *tensors: Tensor) -> Tensors:
        ctx.adjoint = linear.adjoint  # not ``linear``: it may hold its outputs, which hold ctx
        ctx.inputs, ctx.is_anchored = len(tensors), anchor is not None
        tie = torch.empty(0, device="cpu")
        ctx.save_for_backward(tie)
        return *linear.forward(*tensors), tie

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (tie,) = ctx.saved_tensors  # see Note [Ties]
        results = _apply(ctx.adjoint(), tie if torch.is_grad_enabled() else None, gradients[:-1])
        return None, torch.zeros(0, device="cpu") if ctx.is_anchored else None, *results[: ctx.inputs]
