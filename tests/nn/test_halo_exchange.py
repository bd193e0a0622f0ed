"""mpicoll.nn.halo_exchange against one process on the whole domain: values, gradients, convolutions, and what must be refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import mpicoll
from mpicoll.nn import Grid, halo_exchange
from tests.nn.domains import attached, bounds, cut, refused_alike, shape_of, uneven
from tests.support import agree
from tests.support.gradients import check, of_ranks

periodic_or_not = pytest.mark.parametrize("periodic", [False, True], ids=["zeros", "periodic"])
WIDTHS = [1, 3, (2, 1), (0, 2), (3, 0), 0]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def pair(width: int | tuple[int, int]) -> tuple[int, int]:
    return (width, width) if isinstance(width, int) else width


@periodic_or_not
@pytest.mark.parametrize("width", WIDTHS, ids=str)
def test_one_dimension(width: int | tuple[int, int], periodic: bool, rank: int, size: int) -> None:
    """Forward and backward equal one process on the whole domain, along a dimension in the middle, of a transposed tensor."""
    grid = Grid((size,), dims=(1,), periodic=periodic)
    along = {1: uneven(4, size)}
    whole = torch.randn(3, sum(along[1]), 2, dtype=torch.float64, requires_grad=True)
    reference = attached(whole, 1, *pair(width), periodic)
    weight = torch.randn_like(reference)

    mine = cut(whole.detach(), grid, along).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    result = halo_exchange(mine, grid, 1, width)
    agree(torch.equal(result, cut(reference.detach(), grid, along, pair(width), (1,))), result)

    # Each rank's loss weighs its own part with its halo; one process adds up the losses of all.
    windows = [bounds(along[1], r) for r in range(size)]
    parts = [(reference * weight).narrow(1, start, extent + sum(pair(width))) * (start + 1) for start, extent in windows]
    torch.cat(parts, 1).sum().backward()
    (result * cut(weight, grid, along, pair(width), (1,)) * (windows[rank][0] + 1)).sum().backward()
    agree(torch.allclose(mine.grad, cut(whole.grad, grid, along), rtol=1e-12), mine.grad)
    grid.close()


@periodic_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, periodic: bool, rank: int, size: int) -> None:
    """What has no gradient travels as well; conjugated and expanded tensors, and the border's zeros, in every dtype."""
    grid = Grid((size,), periodic=periodic)
    whole = (torch.arange(2 * 3 * size).view(2, 3 * size) % 7).to(dtype)
    mine = whole[:, 3 * rank : 3 * rank + 3]
    if dtype.is_complex:
        whole, mine = (whole * 1j).conj(), (mine * 1j).conj()
    result = halo_exchange(mine, grid, -1, 2)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    expected = attached(whole.to(wide), 1, 2, 2, periodic)[:, 3 * rank : 3 * rank + 7]
    agree(result.dtype == dtype and torch.equal(result.to(wide), expected) and not result.requires_grad, result)
    expanded = halo_exchange(whole[:, :1].expand(2, 3), grid, -1, 1)
    agree(expanded.shape == (2, 5) and torch.equal(expanded[:, 1:4].to(wide), whole[:, :1].expand(2, 3).to(wide)))
    grid.close()


@periodic_or_not
@pytest.mark.parametrize("width", [1, (2, 1), (0, 2)], ids=str)
def test_gradcheck(width: int | tuple[int, int], periodic: bool, size: int) -> None:
    """Parts of two elements: the halos of both sides overlap, and on one or two periodic ranks both neighbours are one."""
    grid = Grid((size,), periodic=periodic)
    check(lambda x: halo_exchange(x.sin(), grid, -1, width).square(), of_ranks(2), twice=size < 3)
    grid.close()


class Convolutions(torch.nn.Module):
    """Three layers of convolutions of 3, 5 and 3, without padding of their own: ``pad`` widens their input."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        kind: Any = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}[dims]
        self.layers = torch.nn.ModuleList(
            kind(before, after, kernel, dtype=torch.float64) for before, after, kernel in ((2, 3, 3), (3, 3, 5), (3, 1, 3))
        )

    def forward(self, x: Tensor, pad: Callable[[Tensor, int], Tensor]) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(pad(x, layer.kernel_size[0] // 2)))
        return x


def convolved(grid: Grid, along: dict[int, list[int]], periodic: bool) -> None:
    """A network over the parts equals one over the whole domain, in its output and in the gradients of input and parameters."""
    dims = len(grid.shape)
    model = Convolutions(dims)
    whole = torch.randn(2, 2, *(sum(extents) for extents in along.values()), dtype=torch.float64)
    target = torch.randn(2, 1, *whole.shape[2:], dtype=torch.float64)

    alone = whole.clone().requires_grad_()
    mode = {"mode": "circular"} if periodic else {"mode": "constant", "value": 0.0}
    expected = model(alone, lambda x, width: F.pad(x, [width] * (2 * dims), **mode))
    (expected - target).square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    def pad(x: Tensor, width: int) -> Tensor:
        for dim in grid.dims:
            x = halo_exchange(x, grid, dim, width)
        return x

    mine = cut(whole, grid, along).requires_grad_()
    output = model(mine, pad)
    agree(torch.allclose(output, cut(expected, grid, along), rtol=1e-10, atol=1e-12), "output")
    (output - cut(target, grid, along)).square().sum().backward()
    agree(torch.allclose(mine.grad, cut(alone.grad, grid, along), rtol=1e-10, atol=1e-12), "input's gradient")
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        mpicoll.all_reduce(parameter.grad, group=grid.group)
        agree(torch.allclose(parameter.grad, gradient, rtol=1e-10, atol=1e-12), f"{parameter.grad} {gradient}")
    agree(torch.allclose(grid.whole(output.detach()), expected, rtol=1e-10, atol=1e-12), "whole output")
    grid.close()


@periodic_or_not
@pytest.mark.parametrize("axes", [1, 2, pytest.param(3, marks=pytest.mark.ranks(1, 8))])
def test_convolutions(axes: int, periodic: bool, size: int) -> None:
    """Corners too: in 2D a rank's convolution reaches the diagonal neighbour's part."""
    grid = Grid(shape_of(size, axes), periodic=periodic)
    extent = 3 if axes == 3 else 4
    convolved(grid, {2 + axis: uneven(extent, ranks) for axis, ranks in enumerate(grid.shape)}, periodic)


def test_periodic_along_one_axis_only(size: int) -> None:
    """A channel: round along one axis, walls along the other; the axes split dims in an order of their own."""
    grid = Grid(shape_of(size, 2), dims=(-1, 0), periodic=(True, False))
    along = {1: uneven(4, grid.shape[0]), 0: uneven(4, grid.shape[1])}
    whole = torch.randn(sum(along[0]), sum(along[1]))
    result = halo_exchange(halo_exchange(cut(whole, grid, along), grid, 1, 2), grid, 0, 2)
    expected = attached(attached(whole, 1, 2, 2, True), 0, 2, 2, False)
    agree(torch.equal(result, cut(expected, grid, along, (2, 2), (0, 1))), result)
    grid.close()


@pytest.mark.min_ranks(2)
def test_a_receive_from_anybody_is_left_alone(rank: int, size: int) -> None:
    """It must get the message that was meant for it, not a halo that comes first."""
    grid = Grid((size,), periodic=True)
    box = torch.zeros(2)
    work = mpicoll.irecv(box) if rank == 0 else None
    x = torch.full((2,), float(rank), requires_grad=True)
    result = halo_exchange(x, grid, 0, 1)
    result.sum().backward()
    agree(result.tolist() == [(rank - 1) % size, rank, rank, (rank + 1) % size] and x.grad.eq(2).all())
    if rank == 1:
        mpicoll.send(torch.tensor([5.0, 6.0]), 0)
    if work is not None:
        work.wait()
    agree(rank > 0 or box.tolist() == [5.0, 6.0], box)
    grid.close()


def test_a_mesh(rank: int, size: int) -> None:
    """One grid is made for a mesh, however often it is used; made anew where the world was."""
    for _ in range(2):
        mesh = init_device_mesh("cpu", shape_of(size, 2))
        for _ in range(2):
            whole = torch.randn(2 * mesh.size(0), 3 * mesh.size(1))
            grid = Grid(mesh)
            mine = halo_exchange(halo_exchange(grid.part(whole), mesh, 0, 1), mesh, 1, 1)
            row, column = 2 * grid.coordinates[0], 3 * grid.coordinates[1]
            agree(torch.equal(mine, F.pad(whole, [1] * 4)[row : row + 4, column : column + 5]), mine)
            grid.close()
        dist.destroy_process_group()
        dist.init_process_group("mpi")


def test_one_rank_alone_requires_grad(rank: int, size: int) -> None:
    """A frozen border: the neighbours must send the gradients home all the same."""
    grid = Grid((size,), periodic=True)
    x = torch.full((1,), rank + 1.0, dtype=torch.float64, requires_grad=rank == size - 1)
    y = halo_exchange(x, grid, 0, 1)
    (y * (rank + 1)).sum().backward()
    expected = sum(r + 1 for r in range(size) for step in (-1, 0, 1) if (r + step) % size == size - 1)
    agree(x.grad is None if rank < size - 1 else x.grad.item() == expected, x.grad)

    x = torch.full((1,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    y = halo_exchange(x, grid, 0, 1)
    loss = y.pow(3).sum() if rank == size - 1 else y.sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    times = [(size - 1 + step) % size for step in (-1, 0, 1)].count(rank)
    agree(second.item() == 6 * (rank + 1) * times, f"{first} {second}")
    grid.close()


@pytest.mark.min_ranks(2)
def test_errors_are_alike(rank: int, size: int) -> None:
    """Before a halo moves, in the same words everywhere, and the grid works on: a message of another size would be garbage."""
    grid = Grid((1, size))
    odd = rank == size - 1
    x = torch.ones(3, 4)

    def exchange(tensor: Any = x, dim: Any = 1, width: Any = 1) -> Callable[[], Tensor]:
        return lambda: halo_exchange(tensor, grid, dim, width)

    wrong = [
        (exchange(x[:2] if odd else x), f"rank {size - 1}: dim 1, width (1, 1), torch.float32, shape (2, 4)"),
        (exchange(x.double() if odd else x), "float64"),
        (exchange(x.unsqueeze(0) if odd else x, -1), "(1, 3, 4)"),
        (exchange(width=2 if odd else 1), "width (2, 2)"),
        (exchange(width=(1, 2) if odd else (2, 1)), "width (1, 2)"),
        (exchange(dim=0 if odd else 1), "dim 0"),
        (exchange(x[:, :1] if odd else x, width=2), "extent 1 along dim 1, too little for a halo of 2"),
        (exchange(width=5), "extent 4 along dim 1, too little for a halo of 5"),
        (exchange(width=-1 if odd else 1), "must be 0 or more"),
        (exchange(width=(1, 2, 3)), "must be 0 or more, or a pair"),
        (exchange(width=1.5), "TypeError: halo_exchange: width must be an int"),
        (exchange(dim=7 if odd else 1), "7 is not a dimension"),
        (exchange(x.unsqueeze(0), dim=0), "not one that the grid splits"),
        (
            exchange("x" if odd else x),
            f"TypeError: halo_exchange: wrong on some rank\n  rank {size - 1}: halo_exchange: tensor must be",
        ),
        (exchange(x.to_sparse() if odd else x), "only torch.strided"),
    ]
    refused_alike(wrong)
    agree(grid.exchanges == 0 and exchange()().shape == (3, 6))
    # At the border nothing is taken from a part that is smaller than the halo that it gets.
    small = halo_exchange(torch.ones(3, 1 if odd else 2), grid, 1, (2, 0))
    agree(small.shape == (3, 3 if odd else 4) and small[:, :2].eq(rank > 0).all(), small)
    grid.close()


@pytest.mark.ranks(4, 8)
def test_only_ranks_of_a_line_must_fit(rank: int, size: int) -> None:
    """Along rows the ranks of a row must have equal heights; other rows may have others. An error in one row reaches all."""
    grid = Grid((2, size // 2))
    tall = torch.ones(2 + grid.coordinates[0], 3)
    agree(halo_exchange(tall, grid, 1, 1).shape == (2 + grid.coordinates[0], 5))
    call = lambda: halo_exchange(tall if rank else torch.ones(4, 3), grid, 1, 1)  # noqa: E731
    refused_alike([(call, "do not fit together"), (call, "rank 0: dim 1")])
    grid.close()
