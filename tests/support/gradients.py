"""``check``: torch.autograd.gradcheck of a function that communicates, meaningful on any number of ranks.

gradcheck perturbs one input and watches the output; a rank by itself sees neither what its input does to the others nor the
others' inputs. So every rank holds the inputs of all, ``X`` of shape (size, ...), and the function checked is the global one:

    X --replicated--> X --[rank]--> this rank's input --function--> this rank's output --of_all--> the outputs of all

Every rank perturbs the same element of ``X`` and sees the same outputs, so that the numeric Jacobian is the global one;
``of_all`` hands each rank its slice of the gradient and ``replicated`` adds up what the ranks found, so that the analytic one
is as well. Between the two, nothing but the function's own backward carries gradients from rank to rank. Both are made of
``everyone`` (mpi4py beside what is under test), and both are differentiable twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck, gradgradcheck

from tests.support import agree, everyone


class _Replicated(torch.autograd.Function):
    """Identity of tensors that are equal on all ranks; the gradients of all ranks are added up."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.stack(_OfAll.apply(gradient)).sum(0) for gradient in gradients)


class _OfAll(torch.autograd.Function):
    """Every rank's tensor, by rank; the gradient is this rank's of them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, ...]:
        ctx.rank = torch.distributed.get_rank()
        return tuple(everyone(tensor.detach().clone()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        mine: Tensor = _Replicated.apply(*gradients)[ctx.rank]
        return mine


def replicated(x: Tensor) -> Tensor:
    """``x``, which must be equal on all ranks; backward adds up the gradients of all ranks (collective, so is backward)."""
    copy: Tensor = _Replicated.apply(x)[0]
    return copy


def of_all(y: Tensor) -> tuple[Tensor, ...]:
    """Every rank's ``y``, by rank, on all ranks; shapes may differ; backward takes this rank's gradient (collective)."""
    tensors: tuple[Tensor, ...] = _OfAll.apply(y)
    return tensors


def check(function: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor, twice: bool = False) -> None:
    """gradcheck of ``function`` as one function of all ranks' inputs; fails on all ranks (collective).

    Args:   function: called on each rank as function(*(X[rank] for X in inputs)); returns a tensor or a sequence of as many
            tensors on each rank, each of which depends on some input (else a rank misses from the backward collective).
            inputs: float64 or complex128, shape (size, ...), equal on all ranks: ``of_ranks`` makes one.
            twice: also gradgradcheck: the backward's own gradient.
    """
    rank = torch.distributed.get_rank()
    agree(all(torch.equal(x, theirs) for every in everyone(inputs) for x, theirs in zip(inputs, every, strict=True)), "inputs")

    def of_the_whole(*whole: Tensor) -> tuple[Tensor, ...]:
        answer = function(*(replicated(x)[rank] for x in whole))
        outputs = [answer] if isinstance(answer, Tensor) else answer
        return tuple(piece for output in outputs for piece in of_all(output))

    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    said = ""
    try:
        gradcheck(of_the_whole, leaves)
        if twice:
            gradgradcheck(of_the_whole, leaves)
    except GradcheckError as wrong:
        said = str(wrong)
    agree(not said, said)


def of_ranks(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers of shape (size, *shape), equal on all ranks: what ``check`` takes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(torch.distributed.get_world_size(), *shape, generator=generator, dtype=dtype)
