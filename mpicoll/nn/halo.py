"""Halo exchange for autograd: how MPI programs split a domain.

Each rank has a part of the domain. Slices of its neighbours are attached to it along one dimension; here with width 1, on four
ranks, not periodic:

    rank 0         rank 1         rank 2         rank 3
      a b c d        e f g h        i j k l        m n o p
    0 a b c d e    d e f g h i    h i j k l m    l m n o p 0

The backward pass is the reverse exchange: the gradient of a halo slice travels to the slice's owner and is added there.

Corners are right if one dimension is exchanged after the other, because the second exchange includes the halos of the first:

    x = halo_exchange(halo_exchange(x, grid, -2, 1), grid, -1, 1)
    y = torch.nn.functional.conv2d(x, weight)       # 3x3: equals this rank's part of conv2d(whole, weight, padding=1)

Parameters. The gradient is that of the SUM of all ranks' losses. Each rank has a copy of the shared weights, and the gradient of
a copy covers only its own use. Add the gradients up before the optimizer steps: ``dist.all_reduce(weight.grad,
group=grid.group)``. (DistributedDataParallel averages: multiply the loss by the number of ranks there.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from mpicoll._api import p2p
from mpicoll._tensors import checks
from mpicoll.nn.grid import Grid
from mpicoll.nn.linear import Linear, Tensors, apply
from mpicoll.nn.preflight import Preflight

SELF = -1  # instead of a neighbour's rank: along a periodic axis of one rank

# Each exchange has tags of its own: if backward passes get out of step, they wait instead of mixing up their gradients.
# MPI guarantees tags up to 32767.
TAGS = 2**14

_grids: dict[tuple[Any, ...], Grid] = {}  # by shape and ranks of a DeviceMesh; a closed grid is replaced at its next use


def halo_exchange(tensor: Tensor, grid: Grid | DeviceMesh, dim: int, width: int | Sequence[int]) -> Tensor:
    """Attaches slices of the neighbours before and after this rank's tensor along ``dim`` (collective over the grid).

    At the border of an axis that is not periodic zeros are attached: a convolution of the result without padding equals a
    zero-padded convolution of the whole domain. Differentiable any number of times. Besides the two messages it costs an
    all_reduce of 32 bytes over the grid, which checks the arguments and tells whether some rank needs a gradient.

    Args:
        tensor: Any strides, one dtype on all ranks. The extents along ``dim`` may differ between ranks.
        grid: A DeviceMesh stands for Grid(mesh), not periodic; its first use makes that grid.
        dim: A dimension that the grid splits.
        width: Number of slices from each side, or (before, after); 0 or more.

    Returns:
        A new tensor, ``before + after`` longer along ``dim``.

    Raises:
        ValueError: On every rank, before data moves: other extents differ within a line of ranks along ``dim``; dim, width or
            dtype differ; a part is smaller than the halo that a neighbour takes from it.

    Example:
        >>> grid = dist.nn.Grid((2,))  # 2 ranks
        >>> part = grid.part(torch.arange(1.0, 7.0))  # 1 2 3 on rank 0, 4 5 6 on rank 1
        >>> dist.nn.halo_exchange(part, grid, dim=-1, width=1).tolist() == [[0, 1, 2, 3, 4], [3, 4, 5, 6, 0]][grid.place]
        True
        >>> grid.close()
    """
    if isinstance(grid, DeviceMesh):
        grid = _grid_of(grid)
    with Preflight("halo_exchange", grid.group, [tensor]) as ranks:
        checks.movable("halo_exchange", tensor)
        axis = grid.axis_of(dim, tensor)
        before, after = _widths(width)
        dim = grid.dims[axis] % tensor.dim()
        other_extents = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
        ranks.equal = (dim, before, after, tensor.dtype, tensor.dim())
        ranks.about = f"dim {dim}, width ({before}, {after}), {tensor.dtype}, shape {tuple(tensor.shape)}"
        ranks.ring(other_extents, *grid.line(axis))
        left, right = grid.neighbours[axis]
        needed = max(before if right is not None else 0, after if left is not None else 0)
        if (extent := tensor.size(dim)) < needed:
            raise ValueError(f"halo_exchange: the part has extent {extent} along dim {dim}, too little for a halo of {needed}")
    grid.exchanges += 1
    tag = 4 * (grid.exchanges % (TAGS // 4))
    swap = Swap(grid.group, _or_self(grid, left), _or_self(grid, right), dim, before, after, tag)
    return apply(attach_halo(swap), [tensor], ranks.requires_grad)[0]


def attach_halo(swap: Swap) -> Linear:
    """The map from a part to [halo of the left, part, halo of the right]."""
    return Linear(swap.attach, lambda: accumulate_halo(replace(swap, tag=swap.tag ^ 2)))


def accumulate_halo(swap: Swap) -> Linear:
    """The map from [halo of the left, part, halo of the right] to the part, plus what the neighbours' halos have for it."""
    return Linear(swap.accumulate, lambda: attach_halo(replace(swap, tag=swap.tag ^ 2)))


@dataclass(frozen=True)
class Swap:
    """Swaps slices along a dimension with the rank before and the rank after, both at the same time."""

    group: ProcessGroup | None
    left: int | None  # global rank, or SELF; None: the border
    right: int | None
    dim: int
    before: int  # width of the halo
    after: int
    tag: int  # of the slices that move up; ``tag + 1``: of those that move down

    def attach(self, part: Tensor) -> Tensors:
        dim, extent = self.dim, part.size(self.dim)
        result = self._empty(part, self.before + extent + self.after)
        from_left, from_right = self._empty(part, self.before), self._empty(part, self.after)
        start = max(extent - self.before, 0)  # at a border, where nothing is sent, a part may be smaller than the halo
        self._swap(part.narrow(dim, 0, min(self.after, extent)), part.narrow(dim, start, extent - start), from_left, from_right)
        result.narrow(dim, 0, self.before).copy_(from_left)
        result.narrow(dim, self.before, extent).copy_(part)
        result.narrow(dim, self.before + extent, self.after).copy_(from_right)
        return (result,)

    def accumulate(self, whole: Tensor) -> Tensors:
        dim, extent = self.dim, whole.size(self.dim) - self.before - self.after
        result = whole.narrow(dim, self.before, extent).clone(memory_format=torch.contiguous_format)
        from_left, from_right = self._empty(whole, self.after), self._empty(whole, self.before)
        halos = whole.narrow(dim, 0, self.before), whole.narrow(dim, self.before + extent, self.after)
        self._swap(*halos, from_left, from_right)
        if self.left is not None:
            result.narrow(dim, 0, self.after).add_(from_left)
        if self.right is not None:
            result.narrow(dim, extent - self.before, self.before).add_(from_right)
        return (result,)

    def _swap(self, to_left: Tensor, to_right: Tensor, from_left: Tensor, from_right: Tensor) -> None:
        """Fills from_left and from_right, which are contiguous: zeros at a border."""
        to_left, to_right = to_left.contiguous(), to_right.contiguous()
        works: list[Work | None] = []
        # Up and down have different tags: on a periodic axis of two ranks, both neighbours are the same rank.
        for peer, receives, tag in ((self.left, from_left, self.tag), (self.right, from_right, self.tag + 1)):
            if peer is None:
                receives.zero_()
            elif peer != SELF and receives.numel() > 0:
                works.append(p2p.irecv(receives, peer, self.group, tag))
        for peer, sends, tag in ((self.right, to_right, self.tag), (self.left, to_left, self.tag + 1)):
            if peer is not None and peer != SELF and sends.numel() > 0:
                works.append(p2p.isend(sends, peer, self.group, tag))
        if self.left == SELF:
            from_left.copy_(to_right)
            from_right.copy_(to_left)
        for work in works:
            assert work is not None
            work.wait()

    def _empty(self, tensor: Tensor, extent: int) -> Tensor:
        return tensor.new_empty([*tensor.shape[: self.dim], extent, *tensor.shape[self.dim + 1 :]])


def _widths(width: int | Sequence[int]) -> tuple[int, int]:
    given = list(width) if isinstance(width, Sequence) else [width, width]
    before_after = [checks.integer("halo_exchange", "width", value) for value in given]
    if len(before_after) != 2 or min(before_after) < 0:
        raise ValueError(f"halo_exchange: width must be 0 or more, or a pair (before, after) of that; got {width}")
    return before_after[0], before_after[1]


def _or_self(grid: Grid, neighbour: int | None) -> int | None:
    return SELF if neighbour == grid.ranks[grid.place] else neighbour


def _grid_of(mesh: DeviceMesh) -> Grid:
    key = (tuple(mesh.mesh.shape), *mesh.mesh.flatten().tolist())
    if key not in _grids or _grids[key].group not in distributed_c10d._world.pg_map:  # or its group was destroyed
        _grids[key] = Grid(mesh)
    return _grids[key]
