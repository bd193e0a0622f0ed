"""The collectives as linear maps with their adjoints.

Ranks are group ranks, and every rank that needs a shape knows it. A map returns new tensors, except where ``output`` is given:
then it writes into that and returns it. Reductions take SUM; another op only for dtypes without gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._api import exchanges, gathers, reductions, scans
from mpicoll._tensors.reductions import Op
from mpicoll.nn.linear import Linear, Tensors

Group = ProcessGroup | None
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


def _contiguous_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def all_reduce(group: Group, op: Op = ReduceOp.SUM) -> Linear:
    """The sum, on every rank."""

    def forward(tensor: Tensor) -> Tensors:
        result = _contiguous_copy(tensor)
        reductions.all_reduce(result, op, group)
        return (result,)

    return Linear(forward, lambda: all_reduce(group))


def broadcast(group: Group, rank: int, src: int) -> Linear:
    """``src``'s tensor, on every rank."""

    def forward(tensor: Tensor) -> Tensors:
        is_src = rank == src
        result = _contiguous_copy(tensor) if is_src else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        gathers.broadcast(result, group=group, group_src=src)
        return (result,)

    return Linear(forward, lambda: reduce(group, rank, src))


def reduce(group: Group, rank: int, dst: int, op: Op = ReduceOp.SUM) -> Linear:
    """The sum on ``dst``, zeros on the other ranks."""

    def forward(tensor: Tensor) -> Tensors:
        result = _contiguous_copy(tensor)
        reductions.reduce(result, op=op, group=group, group_dst=dst)
        return (result if rank == dst else result.zero_(),)

    return Linear(forward, lambda: broadcast(group, rank, dst))


def gather(group: Group, rank: int, dst: int, shapes: Shapes) -> Linear:
    """Every rank's tensor on ``dst``, zeros of these shapes on the other ranks."""

    def forward(tensor: Tensor) -> Tensors:
        make = tensor.new_empty if rank == dst else tensor.new_zeros
        results = [make(shape) for shape in shapes]
        exchanges.gather(tensor.contiguous(), results if rank == dst else None, group=group, group_dst=dst)
        return tuple(results)

    return Linear(forward, lambda: scatter(group, rank, dst, shapes))


def scatter(group: Group, rank: int, src: int, shapes: Shapes, dtype: torch.dtype | None = None) -> Linear:
    """The i-th tensor of ``src``, on rank i. ``dtype``: needed on ranks that give no tensors."""

    def forward(*tensors: Tensor) -> Tensors:
        result = tensors[0].new_empty(shapes[rank]) if tensors else torch.empty(shapes[rank], dtype=dtype)
        sources = [tensor.contiguous() for tensor in tensors] if rank == src else None
        exchanges.scatter(result, sources, group=group, group_src=src)
        return (result,)

    return Linear(forward, lambda: gather(group, rank, src, shapes))


def all_gather(group: Group, rank: int, shapes: Shapes) -> Linear:
    """Every rank's tensor, on every rank."""

    def forward(tensor: Tensor) -> Tensors:
        results = [tensor.new_empty(shape) for shape in shapes]
        gathers.all_gather(results, tensor.contiguous(), group)
        return tuple(results)

    return Linear(forward, lambda: reduce_scatter(group, rank, shapes))


def reduce_scatter(group: Group, rank: int, shapes: Shapes, op: Op = ReduceOp.SUM, output: Tensor | None = None) -> Linear:
    """The sum of all ranks' i-th tensors, on rank i."""

    def forward(*tensors: Tensor) -> Tensors:
        result = tensors[0].new_empty(shapes[rank]) if output is None else output
        reductions.reduce_scatter(result, [tensor.contiguous() for tensor in tensors], op, group)
        return (result,)

    return Linear(forward, lambda: all_gather(group, rank, shapes))


def all_gather_single(group: Group, input_shape: Shape, output_shape: Shape, output: Tensor | None = None) -> Linear:
    """Every rank's tensor as a block of one tensor, on every rank; the blocks are concatenated or stacked."""

    def forward(tensor: Tensor) -> Tensors:
        result = tensor.new_empty(output_shape) if output is None else output
        gathers.all_gather_single(result, tensor.contiguous(), group)
        return (result,)

    return Linear(forward, lambda: reduce_scatter_single(group, output_shape, input_shape))


def reduce_scatter_single(group: Group, input_shape: Shape, output_shape: Shape) -> Linear:
    """The sum of all ranks' i-th blocks of one tensor, on rank i."""

    def forward(tensor: Tensor) -> Tensors:
        result = tensor.new_empty(output_shape)
        reductions.reduce_scatter_single(result, tensor.contiguous(), group=group)
        return (result,)

    return Linear(forward, lambda: all_gather_single(group, output_shape, input_shape))


def all_to_all(group: Group, sends: Shapes, receives: Shapes, outputs: Sequence[Tensor] | None = None) -> Linear:
    """The i-th tensor goes to rank i. ``sends``, ``receives``: shapes to and from each rank."""

    def forward(*tensors: Tensor) -> Tensors:
        results = [tensors[0].new_empty(shape) for shape in receives] if outputs is None else list(outputs)
        exchanges.all_to_all(results, [tensor.contiguous() for tensor in tensors], group)
        return tuple(results)

    return Linear(forward, lambda: all_to_all(group, receives, sends))


def all_to_all_single(
    group: Group,
    input_shape: Shape,
    output_shape: Shape,
    sends: Sequence[int],
    receives: Sequence[int],
    output: Tensor | None = None,
) -> Linear:
    """Rows of dim 0 go to each rank. ``sends``, ``receives``: numbers of rows to and from each rank."""

    def forward(tensor: Tensor) -> Tensors:
        result = tensor.new_empty(output_shape) if output is None else output
        exchanges.all_to_all_single(result, tensor.contiguous(), list(receives), list(sends), group)
        return (result,)

    return Linear(forward, lambda: all_to_all_single(group, output_shape, input_shape, receives, sends))


def scan(group: Group, rank: int, size: int, is_inclusive: bool, is_backwards: bool = False) -> Linear:
    """The sum over the ranks up to this one, or, ``is_backwards``, from this one on; without this one unless ``is_inclusive``."""

    def forward(tensor: Tensor) -> Tensors:
        result = _mirrored(tensor.contiguous(), group, rank, size) if is_backwards else _contiguous_copy(tensor)
        if is_inclusive:
            scans.scan(result, group=group)
        else:
            scans.exscan(result, group=group)
            if rank == 0:
                result.zero_()
        return (_mirrored(result, group, rank, size) if is_backwards else result,)

    return Linear(forward, lambda: scan(group, rank, size, is_inclusive, not is_backwards))


def _mirrored(tensor: Tensor, group: Group, rank: int, size: int) -> Tensor:
    """The tensor of the rank that has this rank's place counted from the end (collective).

    A backwards scan is a scan in this order. The difference of the sum and a scan would be one collective, and loses digits.
    """
    counts = [tensor.numel() if other == size - 1 - rank else 0 for other in range(size)]
    result = torch.empty_like(tensor)
    exchanges.all_to_all_single(result.view(-1), tensor.view(-1), counts, counts, group)
    return result
