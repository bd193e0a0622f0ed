"""Halo exchange: what MPI codes split a domain with, for autograd.

A rank's part of the domain with slices of its neighbours attached along one dimension; here width 1, four ranks, not periodic:

    rank 0         rank 1         rank 2         rank 3
      a b c d        e f g h        i j k l        m n o p
    0 a b c d e    d e f g h i    h i j k l m    l m n o p 0

The backward pass is the exchange turned round: what a rank has found for a slice of its halo goes home and is added there.

Corners come right when one dimension is exchanged after the other, since the second exchange carries the halos of the first:

    x = halo_exchange(halo_exchange(x, grid, -2, 1), grid, -1, 1)
    y = torch.nn.functional.conv2d(x, weight)       # 3x3: equals this rank's part of conv2d(whole, weight, padding=1)

Parameters. The gradient is that of the SUM of all ranks' losses. Weights that all ranks share are copies, and each copy gets the
gradient of its own use only: the copies' gradients must be added up, ``dist.all_reduce(weight.grad, group=grid.group)``, before
the optimizer steps. (DistributedDataParallel averages; multiply the loss by the number of ranks there.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from mpicoll._api import p2p
from mpicoll._tensors import checks
from mpicoll.nn.grid import Grid
from mpicoll.nn.linear import apply
from mpicoll.nn.preflight import Agreement

ITSELF = -1  # in the place of a neighbour's rank: round a periodic axis of one rank

# Every exchange has tags of its own, so that backward passes that are out of step wait and do not mix up their gradients. MPI
# promises tags up to 32767.
TAGS = 2**14

_meshes: dict[tuple[Any, ...], Grid] = {}  # the grids of the meshes that were used in the place of one


def halo_exchange(tensor: Tensor, grid: Grid | DeviceMesh, dim: int, width: int | Sequence[int]) -> Tensor:
    """This rank's tensor with slices of its neighbours attached before and after it along ``dim`` (collective over the grid).

    At the border of an axis that is not periodic zeros are attached, so that a convolution of the result without padding equals
    a zero-padded one of the whole domain. Differentiable any number of times. Besides the two messages, it costs an all_reduce
    of 32 bytes over the grid, by which the ranks make sure that they fit together and whether somebody wants a gradient.

    Args:   tensor: any dtype and strides; the extents along ``dim`` may differ between ranks. grid: or a DeviceMesh, which stands
            for Grid(mesh), not periodic; the first use makes that grid. dim: one that the grid splits.
            width: slices from each side, or (before, after); 0 or more.
    Raises: ValueError, on every rank, before anything moves: ranks of a line along ``dim`` have different other extents; dim,
            width or dtype differ; the neighbour's part is smaller than the halo that is taken from it.
    """
    if isinstance(grid, DeviceMesh):
        grid = _grid_of(grid)
    with Agreement("halo_exchange", grid.group, [tensor]) as ranks:
        checks.movable("halo_exchange", tensor)
        axis = grid.axis_of(dim, tensor)
        before, after = _widths(width)
        dim = grid.dims[axis] % tensor.dim()
        others = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
        ranks.equal = (dim, before, after, tensor.dtype, tensor.dim())
        ranks.about = f"dim {dim}, width ({before}, {after}), {tensor.dtype}, shape {tuple(tensor.shape)}"
        ranks.ring(others, *grid.line(axis))
        left, right = grid.neighbours[axis]
        _enough(tensor, dim, before if right is not None else 0, after if left is not None else 0)
    grid.exchanges += 1
    attach = Attach(grid.group, _itself(grid, left), _itself(grid, right), dim, before, after, 4 * (grid.exchanges % (TAGS // 4)))
    return apply(attach, [tensor], ranks.wanted)[0]


@dataclass(frozen=True)
class Exchange:
    """Slices of a dimension go to the rank before and to the rank after, and come from them, all at the same time.

    left, right: global ranks, or ITSELF; None: the border. before, after: the halos' widths.
    """

    group: ProcessGroup | None
    left: int | None
    right: int | None
    dim: int
    before: int
    after: int
    tag: int

    def swap(self, to_left: Tensor, to_right: Tensor, from_left: Tensor, from_right: Tensor) -> None:
        """Fills from_left and from_right, contiguous; what comes from beyond the border is zero."""
        to_left, to_right = to_left.contiguous(), to_right.contiguous()
        works = []
        # Upward is one tag and downward another: on a periodic axis of two ranks, both neighbours are the same rank.
        for peer, receives, tag in ((self.left, from_left, self.tag), (self.right, from_right, self.tag + 1)):
            if peer is None:
                receives.zero_()
            elif peer != ITSELF and receives.numel() > 0:
                works.append(p2p.irecv(receives, peer, self.group, tag))
        for peer, sends, tag in ((self.right, to_right, self.tag), (self.left, to_left, self.tag + 1)):
            if peer is not None and peer != ITSELF and sends.numel() > 0:
                works.append(p2p.isend(sends, peer, self.group, tag))
        if self.left == ITSELF:
            from_left.copy_(to_right)
            from_right.copy_(to_left)
        for work in works:
            assert work is not None
            work.wait()

    def halo(self, tensor: Tensor, width: int) -> Tensor:
        """Room for slices of a tensor."""
        return tensor.new_empty([*tensor.shape[: self.dim], width, *tensor.shape[self.dim + 1 :]])


class Attach(Exchange):
    """A part becomes [halo of the left, part, halo of the right]."""

    @property
    def adjoint(self) -> AddHome:
        return AddHome(self.group, self.left, self.right, self.dim, self.before, self.after, self.tag ^ 2)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (part,) = tensors
        dim, extent = self.dim, part.size(self.dim)
        result = self.halo(part, self.before + extent + self.after)
        from_left, from_right = self.halo(part, self.before), self.halo(part, self.after)
        start = max(extent - self.before, 0)  # at a border, where nothing is sent, a part may be smaller than the halo
        self.swap(part.narrow(dim, 0, min(self.after, extent)), part.narrow(dim, start, extent - start), from_left, from_right)
        result.narrow(dim, 0, self.before).copy_(from_left)
        result.narrow(dim, self.before, extent).copy_(part)
        result.narrow(dim, self.before + extent, self.after).copy_(from_right)
        return (result,)


class AddHome(Exchange):
    """[halo of the left, part, halo of the right] becomes the part, to which the neighbours' halos of it are added."""

    @property
    def adjoint(self) -> Attach:
        return Attach(self.group, self.left, self.right, self.dim, self.before, self.after, self.tag ^ 2)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (whole,) = tensors
        dim, extent = self.dim, whole.size(self.dim) - self.before - self.after
        result = whole.narrow(dim, self.before, extent).clone(memory_format=torch.contiguous_format)
        from_left, from_right = self.halo(whole, self.after), self.halo(whole, self.before)
        ends = whole.narrow(dim, 0, self.before), whole.narrow(dim, self.before + extent, self.after)
        self.swap(*ends, from_left, from_right)
        if self.left is not None:
            result.narrow(dim, 0, self.after).add_(from_left)
        if self.right is not None:
            result.narrow(dim, extent - self.before, self.before).add_(from_right)
        return (result,)


def _widths(width: int | Sequence[int]) -> tuple[int, int]:
    given = list(width) if isinstance(width, Sequence) else [width, width]
    before_after = [checks.integer("halo_exchange", "width", value) for value in given]
    if len(before_after) != 2 or min(before_after) < 0:
        raise ValueError(f"halo_exchange: width must be 0 or more, or a pair (before, after) of that; got {width}")
    return before_after[0], before_after[1]


def _enough(tensor: Tensor, dim: int, to_right: int, to_left: int) -> None:
    needed = max(to_right, to_left)
    if tensor.size(dim) < needed:
        raise ValueError(
            f"halo_exchange: the part has extent {tensor.size(dim)} along dim {dim}, too little for a halo of {needed}"
        )


def _itself(grid: Grid, neighbour: int | None) -> int | None:
    return ITSELF if neighbour == grid.ranks[grid.place] else neighbour


def _grid_of(mesh: DeviceMesh) -> Grid:
    key = (tuple(mesh.mesh.shape), *mesh.mesh.flatten().tolist())
    if key not in _meshes or _meshes[key].group not in distributed_c10d._world.pg_map:  # or its group was destroyed
        _meshes[key] = Grid(mesh)
    return _meshes[key]
