"""reduce, reduce_scatter, all_reduce, scan and exscan that take part in autograd.

SUM is a linear map, AVG scales it. PRODUCT, MIN and MAX, whose gradients depend on the values, are torch's own kernels on what
the ranks exchange. Scans have SUM only: the sum over the ranks up to this one. torch.distributed.nn does not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._base.errors import UnsupportedReduction
from mpicoll._tensors import buffers, checks, reductions
from mpicoll._tensors.reductions import Op
from mpicoll.nn import linear_collectives
from mpicoll.nn.linear import Linear, apply
from mpicoll.nn.linear_collectives import Shapes
from mpicoll.nn.preflight import Preflight, description

SUM = ReduceOp.SUM

# Sums of half precision are accumulated in float32 and rounded once, as in all_reduce itself.
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}

_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "PRODUCT": lambda stacked: _widened(stacked).prod(0).to(stacked.dtype),
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}


def reduce(tensor: Tensor, dst: int, op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """Returns the reduction of all ranks' tensors on ``dst``, and zeros on the other ranks (collective).

    Unlike torch's, it has the right gradients for AVG, PRODUCT, MIN and MAX, too.

    Args:
        tensor: Of one shape and dtype on all ranks.
        dst: Global rank.
        op: SUM, AVG, PRODUCT, MIN, MAX; for integers and bool also the bitwise ones.
        group: None means the default group.

    Returns:
        A new tensor. On ranks other than ``dst`` it must contribute to the loss, too: it leads back to ``tensor``.

    Raises:
        ValueError: On every rank: shape, dtype, op or dst differ, or dst is not in the group.
        UnsupportedReduction: PREMUL_SUM, or dtype and op have no right answer together.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> total = dist.nn.reduce(torch.tensor([1.0 + rank]), dst=0, op=dist.ReduceOp.MAX)
        >>> total.item() == (2.0, 0.0)[rank]
        True
    """
    with Preflight("reduce", group, [tensor]) as ranks:
        name = _checked_name("reduce", tensor, op)
        root = ranks.group_rank("dst", dst)
        ranks.equal = f"{name} of {description(tensor)} to rank {dst}"
    place = group, ranks.rank, root
    return _reduced(name, tensor, ranks, partial(linear_collectives.reduce, *place), partial(linear_collectives.gather, *place))


def reduce_scatter(output: Tensor, input_list: Sequence[Tensor], op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """Returns on rank i, in ``output``, the reduction of all ranks' ``input_list[i]`` (collective).

    Unlike torch's, it has the right gradients for AVG, PRODUCT, MIN and MAX, too.

    Args:
        output: Overwritten. Of the shape and dtype of ``input_list[rank]``.
        input_list: One tensor for each rank, of one dtype. Shapes may differ within the list, but not between ranks.
        op: As for `reduce`.
        group: None means the default group.

    Returns:
        ``output``, which now depends on the inputs.

    Raises:
        ValueError: On every rank: the list, output or op do not fit together.
        UnsupportedReduction: As for `reduce`.

    Example:
        >>> x = torch.arange(4.0)
        >>> part = dist.nn.reduce_scatter(torch.empty(2), list(x.chunk(2)))  # on 2 ranks
        >>> torch.equal(part, 2 * x.chunk(2)[dist.get_rank()])
        True
    """
    with Preflight("reduce_scatter", group, input_list if isinstance(input_list, (list, tuple)) else ()) as ranks:
        inputs = checks.tensors("reduce_scatter", "input_list", input_list, ranks.size)
        name = _checked_name("reduce_scatter", inputs[0], op)
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        checks.same_dtype("reduce_scatter", *((f"input_list[{i}]", t) for i, t in enumerate(inputs)))
        checks.movable("reduce_scatter", output, "output")
        checks.writable("reduce_scatter", output, "output")
        checks.same_dtype("reduce_scatter", ("output", output), ("the input", inputs[0]))
        if tuple(output.shape) != (part := shapes[ranks.rank]):
            raise ValueError(f"reduce_scatter: output has shape {tuple(output.shape)}, this rank's part of the input {part}")
        ranks.equal = f"{name} of {inputs[0].dtype} {shapes}"
    if name == "SUM" or _is_discrete(output):
        linear = linear_collectives.reduce_scatter(group, ranks.rank, shapes, op, [output])
        return apply(linear, inputs, ranks.requires_grad)[0]
    if name == "AVG":
        linear = linear_collectives.reduce_scatter(group, ranks.rank, shapes)
        result = apply(linear, [_widened(tensor) for tensor in inputs], ranks.requires_grad)[0] / ranks.size
    else:
        linear = linear_collectives.all_to_all(group, shapes, (shapes[ranks.rank],) * ranks.size)
        result = _REDUCE[name](torch.stack(apply(linear, inputs, ranks.requires_grad)))
    delivered: Tensor = _Deliver.apply(result.to(output.dtype), [output])  # type: ignore[no-untyped-call]
    return delivered


def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """Returns the reduction of all ranks' tensors, in a new tensor on every rank (collective).

    Unlike torch's, it has the right gradients for PRODUCT, MIN and MAX, too. For these, each rank reduces its share.

    Args:
        tensor: Of one shape and dtype on all ranks.
        op: SUM, AVG, PRODUCT, MIN, MAX; for integers and bool also the bitwise ones. Ranks that share the minimum or maximum
            share its gradient equally, as in torch.amax.
        group: None means the default group.

    Returns:
        A new tensor.

    Raises:
        ValueError: On every rank: shape, dtype or op differ.
        UnsupportedReduction: A TypeError and ValueError: PREMUL_SUM, or dtype and op have no right answer together.

    Example:
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> y = dist.nn.all_reduce(x)
        >>> y.sum().backward()
        >>> x.grad.item() == dist.get_world_size()  # every rank has a loss, and they are added up
        True
    """
    with Preflight("all_reduce", group, [tensor]) as ranks:
        name = _checked_name("all_reduce", tensor, op)
        ranks.equal = f"{name} of {description(tensor)}"
    gather = partial(linear_collectives.all_gather, group, ranks.rank)
    return _reduced(name, tensor, ranks, partial(linear_collectives.all_reduce, group), gather)


def scan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """Returns the sum of the tensors of ranks 0 to this one (an inclusive prefix sum; collective).

    The gradient is the sum of the gradients of this rank and the ranks after it. torch.distributed.nn has no such function.

    Args:
        tensor: Of one shape and dtype on all ranks.
        op: SUM. `mpicoll.scan` has other reductions, without gradients.
        group: None means the default group. Its order of the ranks counts.

    Returns:
        A new tensor.

    Raises:
        ValueError: On every rank: shape, dtype or op differ, or the group has another backend.
        UnsupportedReduction: On every rank: the op is not SUM.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> y = dist.nn.scan(x)  # 1 on rank 0, 2 on rank 1
        >>> y.sum().backward()
        >>> x.grad.item() == dist.get_world_size() - dist.get_rank()  # the sums of that many ranks contain it
        True
    """
    return _scanned("scan", tensor, op, group, is_inclusive=True)


def exscan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """Returns the sum of the tensors of the ranks before this one (an exclusive prefix sum; collective).

    The gradient is the sum of the gradients of the ranks after this one. torch.distributed.nn has no such function.

    Args:
        tensor: Of one shape and dtype on all ranks.
        op: SUM. `mpicoll.exscan` has other reductions, without gradients.
        group: None means the default group. Its order of the ranks counts.

    Returns:
        A new tensor: zeros on rank 0 of the group, which must contribute to the loss, too.

    Raises:
        ValueError: On every rank: shape, dtype or op differ, or the group has another backend.
        UnsupportedReduction: On every rank: the op is not SUM.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> y = dist.nn.exscan(x)  # 0 on rank 0, 1 on rank 1
        >>> y.sum().backward()
        >>> x.grad.item() == dist.get_world_size() - 1 - dist.get_rank()
        True
    """
    return _scanned("exscan", tensor, op, group, is_inclusive=False)


def _scanned(operation: str, tensor: Tensor, op: Op, group: ProcessGroup | None, is_inclusive: bool) -> Tensor:
    with Preflight(operation, group, [tensor]) as ranks:
        name = _checked_name(operation, tensor, op)
        if name != "SUM":
            raise UnsupportedReduction(
                f"{operation}: {name} has no gradient here; use SUM, or mpicoll.{operation} without gradients"
            )
        ranks.equal = description(tensor)
    linear = linear_collectives.scan(group, ranks.rank, ranks.size, is_inclusive)
    return apply(linear, [tensor], ranks.requires_grad)[0]


def _checked_name(operation: str, tensor: Tensor, op: Op) -> str:
    """Returns the name of the op. Raises UnsupportedReduction if it is PREMUL_SUM, or has no right answer for the dtype."""
    checks.movable(operation, tensor)
    reductions.lookup(operation, tensor.dtype, op)
    name = reductions.name(op)
    if name == "PREMUL_SUM":
        raise UnsupportedReduction(f"{operation}: PREMUL_SUM has no gradient here; multiply the tensor by the factor and use SUM")
    return name


def _is_discrete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _widened(tensor: Tensor) -> Tensor:
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def _reduced(
    name: str, tensor: Tensor, ranks: Preflight, reduce: Callable[[Op], Linear], gather: Callable[[Shapes], Linear]
) -> Tensor:
    """Returns the reduction by the op of this name (collective).

    PRODUCT, MIN and MAX: ranks swap shares of the elements, and torch's own kernel reduces them. So ties, zeros and NaN come out
    as in torch, in the value and in gradients of any order, with memory for two tensors instead of one for each rank.

    Args:
        reduce: Makes the map to the reduction by an op without gradient, or SUM.
        gather: Makes the map from tensors of these shapes to all of them.
    """
    if name == "SUM" or _is_discrete(tensor):
        return apply(reduce(reductions.OPS[name]), [tensor], ranks.requires_grad)[0]
    if name == "AVG":
        (total,) = apply(reduce(reductions.OPS["SUM"]), [_widened(tensor)], ranks.requires_grad)
        return (total / ranks.size).to(tensor.dtype)
    shapes = tuple(tuple(part.shape) for part in tensor.detach().reshape(-1).tensor_split(ranks.size))
    counts = tuple(count for (count,) in shapes)
    own = counts[ranks.rank]
    swap = linear_collectives.all_to_all_single(
        ranks.group, ((tensor.numel(),), (own * ranks.size,)), counts, (own,) * ranks.size
    )
    (stacked,) = apply(swap, [tensor.reshape(-1)], ranks.requires_grad)
    shares = apply(gather(shapes), [_REDUCE[name](stacked.view(ranks.size, own))], ranks.requires_grad)
    return torch.cat(shares).view(tensor.shape)


class _Deliver(torch.autograd.Function):
    """Copies a result into the memory that the caller gave for it. ``box``: a list of that tensor, so that it is no input."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, box: list[Tensor]) -> Tensor:
        buffers.copy_into(box[0], result)
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
