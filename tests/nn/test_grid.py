"""mpicoll.nn.Grid: places, neighbours and parts, against MPI's own Cartesian communicators and torch's tensor_split."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh

from mpicoll.nn import Grid
from tests.nn.domains import raised, refused_alike, shape_of
from tests.support import agree, everyone
from tests.support.gradients import check, of_ranks


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("periodic", [False, True, "first"])
def test_places_are_mpis(axes: int, periodic: bool | str, rank: int, size: int) -> None:
    """Row-major, the last axis fastest; a neighbour on the wrong side would send the other border."""
    shape = shape_of(size, axes)
    rounds = [axis == 0 for axis in range(axes)] if periodic == "first" else [bool(periodic)] * axes
    grid = Grid(shape, periodic=rounds if periodic == "first" else bool(periodic))
    cart = MPI.COMM_WORLD.Create_cart(shape, periods=rounds, reorder=False)
    agree(list(grid.coordinates) == cart.Get_coords(rank) and grid.shape == shape and grid.size == size, grid)
    for axis in range(axes):
        theirs = tuple(None if peer == MPI.PROC_NULL else peer for peer in cart.Shift(axis, 1))
        agree(grid.neighbours[axis] == theirs, f"{grid.neighbours} {theirs}")
    agree(all(grid.rank_of(cart.Get_coords(other)) == other for other in range(size)))
    beyond = [shape[0], *[0] * (axes - 1)]
    if rounds[0]:
        agree(grid.rank_of(beyond) == 0)
    else:
        with pytest.raises(ValueError, match="axis 0 is not periodic"):
            grid.rank_of(beyond)
    agree(f"coordinates {grid.coordinates}" in repr(grid))
    cart.Free()
    grid.close()


@pytest.mark.min_ranks(2)
def test_a_grid_of_some_ranks(rank: int, size: int) -> None:
    """Each half of the world has its own grid at the same time; ranks in the world and in the grid differ."""
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    groups = [dist.new_group(half) for half in halves]
    mine = int(rank >= size // 2)
    grid = Grid((1, len(halves[mine])), group=groups[mine])
    agree(grid.ranks == tuple(halves[mine]) and grid.coordinates == (0, halves[mine].index(rank)), grid)
    agree(grid.whole(torch.tensor([[rank]])).tolist() == [halves[mine]])
    other = groups[1 - mine]
    with pytest.raises(ValueError, match="not in the group"):
        Grid((1, 1), group=other)
    grid.close()
    for group in groups:
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


def test_a_mesh_for_a_shape(rank: int, size: int) -> None:
    """And a row of a mesh: data parallel over one dimension, the domain split over the other, a grid for each replica."""
    mesh = init_device_mesh("cpu", shape_of(size, 2), mesh_dim_names=("replica", "domain"))
    grid, row = Grid(mesh, periodic=True), Grid(mesh["domain"], dims=(0,))
    agree(grid.shape == tuple(mesh.mesh.shape) and list(grid.coordinates) == list(mesh.get_coordinate() or ()), grid)
    agree(list(row.ranks) == mesh["domain"].mesh.tolist() and rank in row.ranks, row)
    agree(row.whole(torch.tensor([float(rank)])).tolist() == [float(r) for r in row.ranks])
    with pytest.raises(ValueError, match="group must be None"):
        Grid(mesh, group=dist.group.WORLD)
    row.close()
    grid.close()


@pytest.mark.parametrize(("axes", "dims"), [(1, None), (1, (0,)), (2, None), (2, (0, -1)), (2, (2, 0)), (3, None)])
def test_parts_make_the_whole(axes: int, dims: tuple[int, ...] | None, rank: int, size: int) -> None:
    """Every element is on one rank, where tensor_split puts it, and comes back to its place, for extents that do not divide."""
    grid = Grid(shape_of(size, axes), dims)
    whole = torch.arange(9 * 10 * 11).view(9, 10, 11)
    part = grid.part(whole)
    sizes = everyone(tuple(part.shape))
    agree(sum(math.prod(shape) for shape in sizes) == whole.numel(), sizes)
    expected = whole
    for axis, dim in enumerate(grid.dims):
        expected = expected.tensor_split(grid.shape[axis], dim)[grid.coordinates[axis]]
    agree(torch.equal(part, expected) and part.data_ptr() == expected.data_ptr())
    agree(torch.equal(grid.whole(part), whole))
    grid.close()


def test_the_whole_of_parts_of_any_extents(rank: int, size: int) -> None:
    """Not only of those that ``part`` makes."""
    grid = Grid((size,), dims=(1,))
    whole = grid.whole(torch.full((2, 1 + rank % 3), rank))
    expected = [r for r in range(size) for _ in range(1 + r % 3)]
    agree(whole.tolist() == [expected, expected], whole)
    grid.close()


def test_the_gradient_of_the_whole() -> None:
    size = dist.get_world_size()
    grid = Grid(shape_of(size, 2))
    check(lambda x: grid.whole(x.sin().view(1, 2)), of_ranks(2))
    grid.close()


def test_what_makes_no_grid(rank: int, size: int) -> None:
    """The same words on all ranks, though one alone is wrong; and the next grid works."""
    odd = rank == size - 1
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: Grid((size + 1,)), f"shape ({size + 1},) has {size + 1} places, the group has {size} ranks"),
        (lambda: Grid((size + odd,)), f"shape ({size + 1},) has {size + 1} places"),
        (lambda: Grid(()), "places"),
        (lambda: Grid((-1, -size)), "places"),
        (lambda: Grid((size, 1), dims=(0,)), "must be 2 different dimensions"),
        (lambda: Grid((size, 1), dims=(1, 1)), "must be 2 different dimensions"),
        (lambda: Grid((size,), periodic=(True, False)), "must be a bool, or 1 of them"),
    ]
    if size > 1:
        wrong.append((lambda: Grid((size, 1) if odd else (1, size)), "do not fit together"))
        wrong.append((lambda: Grid((size,), periodic=odd), "do not fit together"))
    refused_alike(wrong)
    grid = Grid((size, 1), dims=(0, -2))
    for call, words in (
        (lambda: grid.part(torch.ones(size, 1)), "are not distinct"),
        (lambda: grid.part(torch.ones(1)), "not a dimension"),
        (lambda: grid.axis_of(1, torch.ones(1, 1, 1, 1)), "not one that the grid splits"),
    ):
        agree(words in raised(call), raised(call))
    if size > 1:
        agree("too little" in raised(lambda: grid.part(torch.ones(size - 1, 5, 5))))
    agree("has 2 axes" in raised(lambda: grid.rank_of((0,))))
    grid.close()
