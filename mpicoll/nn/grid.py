"""Grid: the ranks of a group as the places of a Cartesian grid, each with its part of a tensor.

Grid((2, 2))                     dims -2 and -1 of a tensor of shape (..., 8, 6)

rank 0 (0, 0)   rank 1 (0, 1)          rows 0-3, columns 0-2    rows 0-3, columns 3-5
rank 2 (1, 0)   rank 3 (1, 1)          rows 4-7, columns 0-2    rows 4-7, columns 3-5
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torchs
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mpicoll._api import groups
from mpicoll.nn import functional
from mpicoll.nn.preflight import Agreement


class Grid:
    """The ranks of a group in row-major order over ``shape`` (collective over them; nobody else calls).

    A grid makes a group of its own, ``group``: its messages never meet those that the program sends or receives, from any source
    say. ``close`` gives it back; destroy_process_group() does as well.

    Args:   shape: ranks along each axis; their product is the group's size. Or a DeviceMesh, whose shape and ranks it then has.
            dims: for each axis the dimension of a tensor that it splits; None: the last ones, the last axis the last.
            periodic: whether the last rank of an axis is the first one's neighbour; one bool, or one for each axis.
            group: None: the default group. Not together with a DeviceMesh.
    Raises: ValueError, on every rank: shape, dims or periodic do not fit, or are not the same on all ranks.
    """

    def __init__(
        self,
        shape: Sequence[int] | DeviceMesh,
        dims: Sequence[int] | None = None,
        periodic: bool | Sequence[bool] = False,
        group: ProcessGroup | None = None,
    ) -> None:
        if isinstance(shape, DeviceMesh):
            if group is not None:
                raise ValueError("Grid: a DeviceMesh has its own ranks; group must be None")
            ranks = shape.mesh.flatten().tolist()
            shape = tuple(shape.mesh.shape)
        else:
            ranks = _members(group)
        if torchs.get_rank() not in ranks:
            raise ValueError(f"Grid: this rank ({torchs.get_rank()}) is not one of its ranks {ranks}")
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.group: ProcessGroup = _new_group(ranks, group)
        try:
            with Agreement("Grid", self.group) as agreement:
                self.shape = _shape(shape, len(ranks))
                self.dims = _dims(dims, len(self.shape))
                self.periodic = _periodic(periodic, len(self.shape))
                agreement.equal = f"shape {self.shape}, dims {self.dims}, periodic {self.periodic}"
        except Exception:
            self.close()
            raise
        self.place = self.ranks.index(torchs.get_rank())  # its number in row-major order
        self.exchanges = 0  # begun so far, on all ranks alike

    def __repr__(self) -> str:
        return f"Grid({self.shape}, dims={self.dims}, periodic={self.periodic}), coordinates {self.coordinates}"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """This rank's place along each axis."""
        place, found = self.place, []
        for extent in reversed(self.shape):
            place, coordinate = divmod(place, extent)
            found.append(coordinate)
        return tuple(reversed(found))

    @property
    def neighbours(self) -> tuple[tuple[int | None, int | None], ...]:
        """For each axis the global ranks before and after this one; None: beyond the border. It may be this rank itself."""
        return tuple((self._step(axis, -1), self._step(axis, +1)) for axis in range(len(self.shape)))

    def rank_of(self, coordinates: Sequence[int]) -> int:
        """The global rank at these coordinates, which go round along periodic axes. ValueError: there is none."""
        if len(coordinates) != len(self.shape):
            raise ValueError(f"Grid.rank_of: {len(coordinates)} coordinates, the grid has {len(self.shape)} axes")
        place = 0
        for axis, (coordinate, extent) in enumerate(zip(coordinates, self.shape, strict=True)):
            if not 0 <= coordinate < extent and not self.periodic[axis]:
                raise ValueError(f"Grid.rank_of: axis {axis} is not periodic and has places 0 to {extent - 1}, not {coordinate}")
            place = place * extent + coordinate % extent
        return self.ranks[place]

    def axis_of(self, dim: int, tensor: Tensor) -> int:
        """The axis that splits dimension ``dim`` of this tensor; ValueError if none does, or two split one dimension."""
        split = self._split(tensor)
        dim = _dimension("dim", dim, tensor.dim())
        if dim not in split:
            raise ValueError(f"dim {dim} of a tensor of {tensor.dim()} is not one that the grid splits: {split}")
        return split.index(dim)

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that is the whole domain: a view, differentiable. No communication.

        Where an extent does not divide evenly, the first ranks along the axis have one more, as torch.tensor_split does it.
        """
        for axis, dim in enumerate(self._split(tensor)):
            if tensor.size(dim) < self.shape[axis]:
                raise ValueError(f"Grid.part: dim {dim} has extent {tensor.size(dim)}, too little for {self.shape[axis]} ranks")
            tensor = tensor.tensor_split(self.shape[axis], dim)[self.coordinates[axis]]
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole domain on every rank, from everybody's part, of any extents that fit (collective).

        Differentiable, as all_gather is: the gradient is that of the sum of all ranks' losses. If every rank computes the same
        loss of the whole, divide it by ``size``, or let one rank alone count it.
        """
        with Agreement("Grid.whole", self.group) as agreement:
            self._split(tensor)
            agreement.equal = f"{tensor.dim()} dimensions"
        parts = functional.all_gather(tensor, self.group)
        in_order = [parts[torchs.get_group_rank(self.group, rank)] for rank in self.ranks]
        for axis, dim in reversed(list(enumerate(self._split(tensor)))):
            extent = self.shape[axis]
            in_order = [torch.cat(in_order[start : start + extent], dim) for start in range(0, len(in_order), extent)]
        return in_order[0]

    def close(self) -> None:
        """Gives the grid's group back (every rank should); the grid cannot be used any more."""
        torchs.destroy_process_group(self.group)

    def _step(self, axis: int, step: int) -> int | None:
        there = list(self.coordinates)
        there[axis] += step
        if not 0 <= there[axis] < self.shape[axis] and not self.periodic[axis]:
            return None
        return self.rank_of(there)

    def line(self, axis: int) -> tuple[int, int]:
        """This rank's place, and that of the next one in the line along an axis, round."""
        here = list(self.coordinates)
        here[axis] = (here[axis] + 1) % self.shape[axis]
        return self.place, self.ranks.index(self.rank_of(here))

    def _split(self, tensor: Tensor) -> list[int]:
        """The dimensions of this tensor that the axes split, 0 or more each."""
        split = [_dimension("dims", dim, tensor.dim()) for dim in self.dims]
        if len(set(split)) < len(split):
            raise ValueError(f"dims {self.dims} of a tensor of {tensor.dim()} dimensions are not distinct")
        return split


def _members(group: ProcessGroup | None) -> list[int]:
    if torchs.get_rank(group) < 0:
        raise ValueError("Grid: this rank is not in the group")
    return torchs.get_process_group_ranks(group)


def _new_group(ranks: Sequence[int], like: ProcessGroup | None) -> Any:
    """Another group of these ranks, of the same backend and timeout (collective over them)."""
    communicator = groups.of(like)
    timeout = None if communicator is None else timedelta(seconds=communicator.timeout_s)
    backend = None if like is None else "mpi" if communicator is not None else torchs.get_backend(like)
    some = len(ranks) < torchs.get_world_size()
    return torchs.new_group(sorted(ranks), timeout=timeout, backend=backend, use_local_synchronization=some)


def _shape(given: Sequence[int], size: int) -> tuple[int, ...]:
    shape = tuple(operator.index(extent) for extent in given)
    if not shape or min(shape) < 1 or math.prod(shape) != size:
        raise ValueError(f"Grid: shape {shape} has {math.prod(shape)} places, the group has {size} ranks; they must be as many")
    return shape


def _dims(given: Sequence[int] | None, axes: int) -> tuple[int, ...]:
    dims = tuple(range(-axes, 0)) if given is None else tuple(operator.index(dim) for dim in given)
    if len(dims) != axes or len(set(dims)) < axes:
        raise ValueError(f"Grid: dims {dims} must be {axes} different dimensions, one for each axis")
    return dims


def _periodic(given: bool | Sequence[bool], axes: int) -> tuple[bool, ...]:
    periodic = (given,) * axes if isinstance(given, bool) else tuple(given)
    if len(periodic) != axes or not all(isinstance(value, bool) for value in periodic):
        raise ValueError(f"Grid: periodic {given!r} must be a bool, or {axes} of them, one for each axis")
    return periodic


def _dimension(what: str, dim: Any, dims: int) -> int:
    number = operator.index(dim)
    if not -dims <= number < dims:
        raise ValueError(f"{what}: {number} is not a dimension of a tensor of {dims}")
    return number % dims
