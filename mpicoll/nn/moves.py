"""The collectives as linear operations with their adjoints; ranks are group ranks, shapes are known to all who need them.

Every operation returns new tensors, or, where ``outputs`` are given, writes into those and returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._api import collectives
from mpicoll._tensors.reductions import Op

Shape = tuple[int, ...]


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class AllReduce:
    """SUM; another op only for dtypes without gradient."""

    group: ProcessGroup | None
    op: Op = ReduceOp.SUM

    @property
    def adjoint(self) -> AllReduce:
        return self

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = copied(tensors[0])
        collectives.all_reduce(result, self.op, self.group)
        return (result,)


@dataclass(frozen=True)
class Broadcast:
    group: ProcessGroup | None
    rank: int
    src: int

    @property
    def adjoint(self) -> Reduce:
        return Reduce(self.group, self.rank, self.src)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = (
            copied(tensors[0]) if self.rank == self.src else torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        )
        collectives.broadcast(result, group=self.group, group_src=self.src)
        return (result,)


@dataclass(frozen=True)
class Reduce:
    """SUM; another op only for dtypes without gradient. Zeros on the other ranks."""

    group: ProcessGroup | None
    rank: int
    dst: int
    op: Op = ReduceOp.SUM

    @property
    def adjoint(self) -> Broadcast:
        return Broadcast(self.group, self.rank, self.dst)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = copied(tensors[0])
        collectives.reduce(result, op=self.op, group=self.group, group_dst=self.dst)
        return (result if self.rank == self.dst else result.zero_(),)


@dataclass(frozen=True)
class Gather:
    """Zeros of the same shapes on the other ranks."""

    group: ProcessGroup | None
    rank: int
    dst: int
    shapes: tuple[Shape, ...]

    @property
    def adjoint(self) -> Scatter:
        return Scatter(self.group, self.rank, self.dst, self.shapes, None)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        mine = tensors[0].contiguous()
        if self.rank == self.dst:
            results = [mine.new_empty(shape) for shape in self.shapes]
            collectives.gather(mine, results, group=self.group, group_dst=self.dst)
        else:
            collectives.gather(mine, None, group=self.group, group_dst=self.dst)
            results = [mine.new_zeros(shape) for shape in self.shapes]
        return tuple(results)


@dataclass(frozen=True)
class Scatter:
    """``dtype``: for ranks that have no tensors; None: that of the tensors."""

    group: ProcessGroup | None
    rank: int
    src: int
    shapes: tuple[Shape, ...]
    dtype: torch.dtype | None

    @property
    def adjoint(self) -> Gather:
        return Gather(self.group, self.rank, self.src, self.shapes)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        shape = self.shapes[self.rank]
        result = tensors[0].new_empty(shape) if tensors else torch.empty(shape, dtype=self.dtype)
        sources = [tensor.contiguous() for tensor in tensors] if self.rank == self.src else None
        collectives.scatter(result, sources, group=self.group, group_src=self.src)
        return (result,)


@dataclass(frozen=True)
class AllGather:
    group: ProcessGroup | None
    rank: int
    shapes: tuple[Shape, ...]

    @property
    def adjoint(self) -> ReduceScatter:
        return ReduceScatter(self.group, self.rank, self.shapes)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        mine = tensors[0].contiguous()
        results = [mine.new_empty(shape) for shape in self.shapes]
        collectives.all_gather(results, mine, self.group)
        return tuple(results)


@dataclass(frozen=True)
class ReduceScatter:
    """SUM; another op only for dtypes without gradient."""

    group: ProcessGroup | None
    rank: int
    shapes: tuple[Shape, ...]
    op: Op = ReduceOp.SUM
    output: Tensor | None = None

    @property
    def adjoint(self) -> AllGather:
        return AllGather(self.group, self.rank, self.shapes)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = tensors[0].new_empty(self.shapes[self.rank]) if self.output is None else self.output
        collectives.reduce_scatter(result, [tensor.contiguous() for tensor in tensors], self.op, self.group)
        return (result,)


@dataclass(frozen=True)
class AllGatherSingle:
    """Blocks of one tensor, one after the other or stacked."""

    group: ProcessGroup | None
    source: Shape
    target: Shape
    output: Tensor | None = None

    @property
    def adjoint(self) -> ReduceScatterSingle:
        return ReduceScatterSingle(self.group, self.target, self.source)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        mine = tensors[0].contiguous()
        result = mine.new_empty(self.target) if self.output is None else self.output
        collectives.all_gather_single(result, mine, self.group)
        return (result,)


@dataclass(frozen=True)
class ReduceScatterSingle:
    group: ProcessGroup | None
    source: Shape
    target: Shape

    @property
    def adjoint(self) -> AllGatherSingle:
        return AllGatherSingle(self.group, self.target, self.source)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = tensors[0].new_empty(self.target)
        collectives.reduce_scatter_single(result, tensors[0].contiguous(), group=self.group)
        return (result,)


@dataclass(frozen=True)
class AllToAll:
    """Tensors of these shapes go, of those come."""

    group: ProcessGroup | None
    sends: tuple[Shape, ...]
    receives: tuple[Shape, ...]
    outputs: Sequence[Tensor] | None = None

    @property
    def adjoint(self) -> AllToAll:
        return AllToAll(self.group, self.receives, self.sends)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = [tensors[0].new_empty(shape) for shape in self.receives] if self.outputs is None else list(self.outputs)
        collectives.all_to_all(results, [tensor.contiguous() for tensor in tensors], self.group)
        return tuple(results)


@dataclass(frozen=True)
class AllToAllSingle:
    """Rows of dim 0: as many as ``sends`` says go to each rank, as many as ``receives`` says come."""

    group: ProcessGroup | None
    source: Shape
    target: Shape
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    output: Tensor | None = None

    @property
    def adjoint(self) -> AllToAllSingle:
        return AllToAllSingle(self.group, self.target, self.source, self.receives, self.sends)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = tensors[0].new_empty(self.target) if self.output is None else self.output
        collectives.all_to_all_single(result, tensors[0].contiguous(), list(self.receives), list(self.sends), self.group)
        return (result,)
