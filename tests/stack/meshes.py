"""What the tests on meshes share: the shapes that a number of ranks allows, and one process's answer to compare with."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement


def grids(size: int, ndim: int) -> list[tuple[int, ...]]:
    """Every shape of ``ndim`` dimensions with ``size`` ranks: (1, 4), (2, 2), (4, 1) for 4 and 2."""
    if ndim == 1:
        return [(size,)]
    return [(first, *rest) for first in range(1, size + 1) if size % first == 0 for rest in grids(size // first, ndim - 1)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    """Small whole numbers, the same on all ranks, exact in every dtype."""
    values = torch.arange(start, start + math.prod(shape)).reshape(shape) % 7
    return values % 3 == 0 if dtype == torch.bool else values.to(dtype)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normally distributed numbers, the same on all ranks and in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def line(size: int) -> DeviceMesh:
    """All ranks along one dimension."""
    return init_device_mesh("cpu", (size,))


def place(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's coordinate; empty for a rank that is not in the mesh."""
    return tuple(mesh.get_coordinate() or ())


def share_of(whole: Tensor, shape: tuple[int, ...], coordinate: tuple[int, ...], placements: Iterable[Placement]) -> Tensor:
    """What the rank at ``coordinate`` of a mesh of ``shape`` holds of ``whole`` (no Partial), by torch.chunk alone."""
    for count, place, placement in zip(shape, coordinate, placements, strict=True):
        if placement.is_shard():
            chunks = whole.chunk(count, placement.dim)
            whole = chunks[place] if place < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's full tensor; another tensor itself. (Collective for DTensors.)"""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
