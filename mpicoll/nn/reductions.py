"""reduce, reduce_scatter and all_reduce that take part in autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._tensors import checks
from mpicoll._tensors.reductions import Op
from mpicoll.nn import linear_collectives
from mpicoll.nn.linear import apply
from mpicoll.nn.nonlinear import REDUCE, Deliver, checked_name, is_discrete, reduced, widened
from mpicoll.nn.preflight import Preflight, description

SUM = ReduceOp.SUM


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
        name = checked_name("reduce", tensor, op)
        root = ranks.group_rank("dst", dst)
        ranks.equal = f"{name} of {description(tensor)} to rank {dst}"
    place = group, ranks.rank, root
    return reduced(name, tensor, ranks, partial(linear_collectives.reduce, *place), partial(linear_collectives.gather, *place))


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
        name = checked_name("reduce_scatter", inputs[0], op)
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)
        checks.same_dtype("reduce_scatter", *((f"input_list[{i}]", t) for i, t in enumerate(inputs)))
        checks.movable("reduce_scatter", output, "output")
        checks.writable("reduce_scatter", output, "output")
        checks.same_dtype("reduce_scatter", ("output", output), ("the input", inputs[0]))
        if tuple(output.shape) != (part := shapes[ranks.rank]):
            raise ValueError(f"reduce_scatter: output has shape {tuple(output.shape)}, this rank's part of the input {part}")
        ranks.equal = f"{name} of {inputs[0].dtype} {shapes}"
    if name == "SUM" or is_discrete(output):
        linear = linear_collectives.reduce_scatter(group, ranks.rank, shapes, op, output)
        return apply(linear, inputs, ranks.requires_grad)[0]
    if name == "AVG":
        linear = linear_collectives.reduce_scatter(group, ranks.rank, shapes)
        result = apply(linear, [widened(tensor) for tensor in inputs], ranks.requires_grad)[0] / ranks.size
    else:
        linear = linear_collectives.all_to_all(group, shapes, (shapes[ranks.rank],) * ranks.size)
        result = REDUCE[name](torch.stack(apply(linear, inputs, ranks.requires_grad)))
    delivered: Tensor = Deliver.apply(result.to(output.dtype), [output])  # type: ignore[no-untyped-call]
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
        name = checked_name("all_reduce", tensor, op)
        ranks.equal = f"{name} of {description(tensor)}"
    gather = partial(linear_collectives.all_gather, group, ranks.rank)
    return reduced(name, tensor, ranks, partial(linear_collectives.all_reduce, group), gather)
