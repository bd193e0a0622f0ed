"""A Cartesian grid of ranks, each with its part of a tensor.

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

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from mpicoll._api import groups
from mpicoll.nn import functional
from mpicoll.nn.preflight import Preflight


class Grid:
    """The ranks of a group in row-major order over ``shape`` (collective over these ranks only).

    A grid makes a group of its own, so that its messages never match receives of the program (from any source, for example).
    `close` or destroy_process_group() frees it. torch has no such class; a DeviceMesh has no borders and neighbours.

    Args:
        shape: Number of ranks along each axis; the product is the size of the group. Or a DeviceMesh with the shape and ranks.
        dims: For each axis the dimension of a tensor that it splits. None: the last dimensions, in order.
        periodic: Whether the first and the last rank of an axis are neighbours. One bool, or one for each axis.
        group: None: the default group. Must be None with a DeviceMesh.

    Attributes:
        group: The grid's own group.
        ranks: Global ranks in row-major order.
        place: Index of this rank in ``ranks``.
        exchanges: Number of halo exchanges begun, equal on all ranks.

    Raises:
        ValueError: On every rank: shape, dims or periodic do not fit, or differ between ranks.

    Example:
        >>> grid = dist.nn.Grid((2, 1))  # 2 ranks
        >>> grid.part(torch.arange(48.0).view(8, 6)).shape
        torch.Size([4, 6])
        >>> grid.neighbours == (((None, 1), (None, None)), ((0, None), (None, None)))[grid.place]
        True
        >>> grid.close()
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
        elif torch_dist.get_rank(group) < 0:
            raise ValueError("Grid: this rank is not in the group")
        else:
            ranks = torch_dist.get_process_group_ranks(group)
        if torch_dist.get_rank() not in ranks:
            raise ValueError(f"Grid: this rank ({torch_dist.get_rank()}) is not one of its ranks {ranks}")
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.group: ProcessGroup = _new_group(ranks, group)
        try:
            with Preflight("Grid", self.group) as preflight:
                self.shape = _shape(shape, len(ranks))
                self.dims = _dims(dims, len(self.shape))
                self.periodic = _periodic(periodic, len(self.shape))
                preflight.equal = f"shape {self.shape}, dims {self.dims}, periodic {self.periodic}"
        except Exception:
            self.close()
            raise
        self.place = self.ranks.index(torch_dist.get_rank())
        self.exchanges = 0

    def __repr__(self) -> str:
        return f"Grid({self.shape}, dims={self.dims}, periodic={self.periodic}), coordinates {self.coordinates}"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """This rank's index along each axis."""
        return tuple(map(int, np.unravel_index(self.place, self.shape)))

    @property
    def neighbours(self) -> tuple[tuple[int | None, int | None], ...]:
        """The global ranks before and after this one along each axis; None beyond the border. May be this rank itself."""
        return tuple((self._step(axis, -1), self._step(axis, +1)) for axis in range(len(self.shape)))

    def rank_of(self, coordinates: Sequence[int]) -> int:
        """Returns the global rank at these coordinates, which wrap around along periodic axes.

        Args:
            coordinates: One index for each axis.

        Raises:
            ValueError: There is none.
        """
        if len(coordinates) != len(self.shape):
            raise ValueError(f"Grid.rank_of: {len(coordinates)} coordinates, the grid has {len(self.shape)} axes")
        for axis, (coordinate, extent) in enumerate(zip(coordinates, self.shape, strict=True)):
            if not 0 <= coordinate < extent and not self.periodic[axis]:
                raise ValueError(f"Grid.rank_of: axis {axis} is not periodic and has places 0 to {extent - 1}, not {coordinate}")
        return self.ranks[np.ravel_multi_index(coordinates, self.shape, mode="wrap")]

    def axis_of(self, dim: int, tensor: Tensor) -> int:
        """Returns the axis that splits dimension ``dim`` of this tensor.

        Args:
            dim: A dimension of the tensor; negative ones count from the last.
            tensor: Any tensor of the domain; only its number of dimensions matters.

        Raises:
            ValueError: No axis splits it, or two do.
        """
        split = self._split(tensor)
        dim = _dimension("dim", dim, tensor.dim())
        if dim not in split:
            raise ValueError(f"dim {dim} of a tensor of {tensor.dim()} is not one that the grid splits: {split}")
        return split.index(dim)

    def part(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a tensor that covers the whole domain: a differentiable view, without communication.

        If an extent does not divide evenly, the first ranks along the axis have one more, as in torch.tensor_split.

        Args:
            tensor: The whole domain.

        Raises:
            ValueError: An extent is smaller than the number of ranks along its axis.
        """
        for axis, dim in enumerate(self._split(tensor)):
            if tensor.size(dim) < self.shape[axis]:
                raise ValueError(f"Grid.part: dim {dim} has extent {tensor.size(dim)}, too little for {self.shape[axis]} ranks")
            tensor = tensor.tensor_split(self.shape[axis], dim)[self.coordinates[axis]]
        return tensor

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns the whole domain on every rank, put together from all ranks' parts (collective).

        Differentiable like all_gather: the gradient is that of the sum of all ranks' losses. If every rank computes the same loss
        of the whole domain, divide it by ``size``, or let only one rank count it.

        Args:
            tensor: This rank's part.

        Raises:
            ValueError: On every rank: the parts have different numbers of dimensions, or do not fit together.
        """
        with Preflight("Grid.whole", self.group) as preflight:
            self._split(tensor)
            preflight.equal = f"{tensor.dim()} dimensions"
        parts = functional.all_gather(tensor, self.group)
        in_order = [parts[torch_dist.get_group_rank(self.group, rank)] for rank in self.ranks]
        for axis, dim in reversed(list(enumerate(self._split(tensor)))):
            extent = self.shape[axis]
            in_order = [torch.cat(in_order[start : start + extent], dim) for start in range(0, len(in_order), extent)]
        return in_order[0]

    def close(self) -> None:
        """Frees the grid's group (collective). The grid cannot be used any more."""
        torch_dist.destroy_process_group(self.group)

    def _step(self, axis: int, step: int) -> int | None:
        coordinates = list(self.coordinates)
        coordinates[axis] += step
        if not 0 <= coordinates[axis] < self.shape[axis] and not self.periodic[axis]:
            return None
        return self.rank_of(coordinates)

    def line(self, axis: int) -> tuple[int, int]:
        """Returns the places of this rank and of the next one along an axis; after the last rank comes the first.

        Args:
            axis: Number of the axis.
        """
        coordinates = list(self.coordinates)
        coordinates[axis] = (coordinates[axis] + 1) % self.shape[axis]
        return self.place, self.ranks.index(self.rank_of(coordinates))

    def _split(self, tensor: Tensor) -> list[int]:
        """Returns the dimension of this tensor that each axis splits, counted from 0."""
        split = [_dimension("dims", dim, tensor.dim()) for dim in self.dims]
        if len(set(split)) < len(split):
            raise ValueError(f"dims {self.dims} of a tensor of {tensor.dim()} dimensions are not distinct")
        return split


def _new_group(ranks: Sequence[int], like: ProcessGroup | None) -> Any:
    """Makes another group of these ranks, with the same backend and timeout (collective over these ranks)."""
    communicator = groups.of(like)
    timeout = None if communicator is None else timedelta(seconds=communicator.timeout_s)
    backend = None if like is None else "mpi" if communicator is not None else torch_dist.get_backend(like)
    some = len(ranks) < torch_dist.get_world_size()
    return torch_dist.new_group(sorted(ranks), timeout=timeout, backend=backend, use_local_synchronization=some)


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
