"""What the tests of mpicoll.nn share: one process's view of a domain that a Grid splits, errors that ranks must raise alike."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpicoll.nn import Grid
from tests.support import agree, everyone


def shape_of(size: int, axes: int) -> tuple[int, ...]:
    """As many places as ranks, as near to a cube as 1, 2, 4 and 8 ranks allow: (2, 2) for 4 on two axes."""
    shape = [1] * axes
    axis = axes - 1
    while size > 1:
        factor = next(f for f in range(2, size + 1) if size % f == 0)
        shape[axis] *= factor
        size, axis = size // factor, (axis - 1) % axes
    return tuple(shape)


def attached(whole: Tensor, dim: int, before: int, after: int, periodic: bool) -> Tensor:
    """The whole domain with its own other end attached, or zeros."""
    extent = whole.size(dim)
    ends = whole.narrow(dim, extent - before, before), whole.narrow(dim, 0, after)
    if not periodic:
        ends = torch.zeros_like(ends[0]), torch.zeros_like(ends[1])
    return torch.cat([ends[0], whole, ends[1]], dim)


def bounds(extents: Sequence[int], place: int) -> tuple[int, int]:
    """Where the part of a place begins, and its extent."""
    return sum(extents[:place]), extents[place]


def cut(
    whole: Tensor, grid: Grid, extents: dict[int, Sequence[int]], halo: tuple[int, int] = (0, 0), halos: Sequence[int] = ()
) -> Tensor:
    """This rank's part by given extents along each dimension; with its halo along those dimensions to which it was attached."""
    for dim, along in extents.items():
        start, extent = bounds(along, grid.coordinates[grid.axis_of(dim, whole)])
        whole = whole.narrow(dim, start, extent + (sum(halo) if dim in halos else 0))
    return whole


def uneven(extent: int, ranks: int) -> list[int]:
    """Extents that differ from rank to rank, none below 3, which add up to whatever they add up to."""
    return [extent + rank % 2 - (rank == 0) for rank in range(ranks)]


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refused_alike(calls: Sequence[tuple[Callable[[], object], str]]) -> None:
    """Each call must raise a TypeError or ValueError with these words in it, in the same words on every rank (collective)."""
    for call, words in calls:
        said = raised(call)
        agree(words in said and len(set(everyone(said))) == 1, said)
