"""Moving data between ranks is a linear map of all ranks' tensors together; its gradient is the adjoint map, another such move.

    all_reduce SUM <-> itself           gather     <-> scatter          all_to_all <-> itself, backwards
    broadcast      <-> reduce SUM       all_gather <-> reduce_scatter SUM
    halo: attach   <-> halo: add home

So each operation says what it does and which one is its adjoint, and ``apply`` makes it differentiable any number of times. The
gradient is that of the SUM of all ranks' losses, as in torch.distributed.nn.functional: no rank's loss is divided by anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class Operation(Protocol):
    """A linear map of all ranks' tensors: of tensors from here and elsewhere to new tensors (collective)."""

    @property
    def group(self) -> ProcessGroup | None: ...

    @property
    def adjoint(self) -> Operation:
        """What takes the gradients of the outputs to those of the inputs."""

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]: ...


def apply(operation: Operation, tensors: Sequence[Tensor], wanted: bool) -> tuple[Tensor, ...]:
    """The operation's outputs, differentiable (collective, so is backward).

    Args:   wanted: whether some rank's tensors require grad. Then the outputs do on every rank: if one of them stayed out of the
            backward pass, the others would wait for it.
    """
    alone = wanted and torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors)
    return _apply(operation, torch.empty(0, requires_grad=True, device="cpu") if alone else None, tensors)


def _apply(operation: Operation, anchor: Tensor | None, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = _Apply.apply(operation, anchor, *tensors)  # type: ignore[no-untyped-call]
    return outputs[:-1]


# Note [Threads]
# The gradient of a gradient goes through the adjoint, and from there through what the gradients came from, on every rank where
# they depend on something. On a rank whose loss is linear they do not: its graph would end at the adjoint, while the others go on
# to the operation itself, a collective, and wait. So each operation has an output more, a thread without elements, and in a
# backward pass with create_graph the adjoint is tied to it: whoever comes through the adjoint comes through the operation.


class _Apply(torch.autograd.Function):
    """``anchor``: a tensor without elements that the outputs shall lead back to; or None."""

    @staticmethod
    def forward(ctx: Any, operation: Operation, anchor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.adjoint = operation.adjoint  # not the operation, which may hold its outputs: they hold ctx
        ctx.inputs, ctx.anchored = len(tensors), anchor is not None
        thread = torch.empty(0, device="cpu")
        ctx.save_for_backward(thread)
        return *operation(*tensors), thread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (thread,) = ctx.saved_tensors  # see Note [Threads]
        found = _apply(ctx.adjoint, thread if torch.is_grad_enabled() else None, gradients[:-1])
        return None, torch.zeros(0, device="cpu") if ctx.anchored else None, *found[: ctx.inputs]
