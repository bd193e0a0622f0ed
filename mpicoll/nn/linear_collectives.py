"""The collectives as linear maps with their adjoints.

Ranks are group ranks, and every rank that needs a shape knows it. A map returns new tensors, except where ``outputs`` are
given: then it writes into those and returns them. Reductions take SUM; another op only for dtypes without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._api import exchanges, gathers, reductions
from mpicoll._tensors.reductions import Op
from mpicoll.nn.linear import Linear, Tensors

Group = ProcessGroup | None
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Outputs = Sequence[Tensor] | None


def _in_place(collective: Callable[[Tensor], object], adjoint: Callable[[], Linear], reads: bool = True) -> Linear:
    """The map of a collective that overwrites its tensor: a copy. ``reads``: the values of this rank's tensor matter."""
    make = torch.clone if reads else torch.empty_like

    def forward(tensor: Tensor) -> Tensors:
        result = make(tensor.detach(), memory_format=torch.contiguous_format)
        collective(result)
        return (result,)

    return Linear(forward, adjoint)


def _filling(
    shapes: Shapes, outputs: Outputs, collective: Callable[[list[Tensor], list[Tensor]], object], adjoint: Callable[[], Linear]
) -> Linear:
    """The map of a collective (results, tensors) whose results are ``outputs``, or new tensors of these shapes."""

    def forward(*tensors: Tensor) -> Tensors:
        results = [tensors[0].new_empty(shape) for shape in shapes] if outputs is None else list(outputs)
        collective(results, [tensor.contiguous() for tensor in tensors])
        return tuple(results)

    return Linear(forward, adjoint)


def all_reduce(group: Group, op: Op = ReduceOp.SUM) -> Linear:
    """The sum, on every rank."""
    return _in_place(lambda result: reductions.all_reduce(result, op, group), lambda: all_reduce(group))


def broadcast(group: Group, rank: int, src: int) -> Linear:
    """``src``'s tensor, on every rank."""
    collective = partial(gathers.broadcast, group=group, group_src=src)
    return _in_place(collective, lambda: reduce(group, rank, src), reads=rank == src)


def reduce(group: Group, rank: int, dst: int, op: Op = ReduceOp.SUM) -> Linear:
    """The sum on ``dst``, zeros on the other ranks."""

    def collective(result: Tensor) -> None:
        reductions.reduce(result, op=op, group=group, group_dst=dst)
        if rank != dst:
            result.zero_()

    return _in_place(collective, lambda: broadcast(group, rank, dst))


def gather(group: Group, rank: int, dst: int, shapes: Shapes) -> Linear:
    """Every rank's tensor on ``dst``, zeros of these shapes on the other ranks."""

    def collective(results: list[Tensor], tensors: list[Tensor]) -> None:
        gathers.gather(tensors[0], results if rank == dst else None, group=group, group_dst=dst)
        if rank != dst:
            torch._foreach_zero_(results)

    return _filling(shapes, None, collective, lambda: scatter(group, rank, dst, shapes))


def scatter(group: Group, rank: int, src: int, shapes: Shapes, outputs: Outputs = None) -> Linear:
    """The i-th tensor of ``src``, on rank i. ``outputs``: one tensor, needed on ranks that give no tensors."""

    def collective(results: list[Tensor], tensors: list[Tensor]) -> None:
        gathers.scatter(results[0], tensors if rank == src else None, group=group, group_src=src)

    return _filling((shapes[rank],), outputs, collective, lambda: gather(group, rank, src, shapes))


def all_gather(group: Group, rank: int, shapes: Shapes) -> Linear:
    """Every rank's tensor, on every rank."""

    def collective(results: list[Tensor], tensors: list[Tensor]) -> None:
        gathers.all_gather(results, tensors[0], group)

    return _filling(shapes, None, collective, lambda: reduce_scatter(group, rank, shapes))


def reduce_scatter(group: Group, rank: int, shapes: Shapes, op: Op = ReduceOp.SUM, outputs: Outputs = None) -> Linear:
    """The sum of all ranks' i-th tensors, on rank i."""

    def collective(results: list[Tensor], tensors: list[Tensor]) -> None:
        reductions.reduce_scatter(results[0], tensors, op, group)

    return _filling((shapes[rank],), outputs, collective, lambda: all_gather(group, rank, shapes))


def all_gather_single(group: Group, input_shape: Shape, output_shape: Shape, outputs: Outputs = None) -> Linear:
    """Every rank's tensor as a block of one tensor, on every rank; the blocks are concatenated or stacked."""

    def collective(results: list[Tensor], tensors: list[Tensor]) -> None:
        gathers.all_gather_single(results[0], tensors[0], group)

    return _filling((output_shape,), outputs, collective, lambda: reduce_scatter_single(group, output_shape, input_shape))


def reduce_scatter_single(group: Group, input_shape: Shape, output_shape: Shape) -> Linear:
    """The sum of all ranks' i-th blocks of one tensor, on rank i."""

    def collective(results: list[Tensor], tensors: list[Tensor]) -> None:
        reductions.reduce_scatter_single(results[0], tensors[0], group=group)

    return _filling((output_shape,), None, collective, lambda: all_gather_single(group, output_shape, input_shape))


def all_to_all(group: Group, sends: Shapes, receives: Shapes, outputs: Outputs = None) -> Linear:
    """The i-th tensor goes to rank i. ``sends``, ``receives``: shapes to and from each rank."""
    return _filling(receives, outputs, partial(exchanges.all_to_all, group=group), lambda: all_to_all(group, receives, sends))


def all_to_all_single(
    group: Group, shapes: tuple[Shape, Shape], sends: Sequence[int], receives: Sequence[int], outputs: Outputs = None
) -> Linear:
    """Rows of dim 0 go to each rank: numbers of rows to and from each rank. ``shapes``: of input and output."""

    def collective(results: list[Tensor], tensors: list[Tensor]) -> None:
        exchanges.all_to_all_single(results[0], tensors[0], list(receives), list(sends), group)

    return _filling(shapes[1:], outputs, collective, lambda: all_to_all_single(group, shapes[::-1], receives, sends))


def scan(group: Group, rank: int, size: int, is_inclusive: bool, is_backwards: bool = False) -> Linear:
    """The sum over the ranks up to this one, or, ``is_backwards``, from this one on; without this one unless ``is_inclusive``."""

    def forward(tensor: Tensor) -> Tensors:
        result = (
            _mirrored(tensor.contiguous(), group, rank, size)
            if is_backwards
            else tensor.detach().clone(memory_format=torch.contiguous_format)
        )
        if is_inclusive:
            reductions.scan(result, group=group)
        else:
            reductions.exscan(result, group=group)
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
