# python -m mpicoll.run -n 4 examples/halo_convolution.py
"""Trains a convolutional network on a field that is split over the ranks: it learns to diffuse heat, on a torus.

Each rank has a tile of the field. A convolution of 3x3 needs one row and one column more on each side, which are the neighbours':

        columns                       what rank 0 convolves: its tile and a halo, the corners too
      +--------+--------+                 x | x x x x | x
      | rank 0 | rank 1 |                 --+---------+--
      |        |        |                 x | o o o o | x        halo_exchange along the rows sends o to x, then along
      +--------+--------+                 x | o o o o | x        the columns what it has by now, halos included: so
      | rank 2 | rank 3 |                 x | o o o o | x        the corners come from the diagonal neighbour
      |        |        |                 --+---------+--
      +--------+--------+                 x | x x x x | x

Going back, autograd takes the gradient of every x home to the rank whose o it was. The weights are the same on all ranks; each
has the gradient of its own tile, and their sum is the gradient of the whole: one all_reduce.

Any number of ranks. A test runs it in float64 and in one process: loss and gradients differ by at most 1e-8 of themselves.

    python -m mpicoll.run -n 4 examples/halo_convolution.py --plot field.png      a field, its tiles, the loss; needs matplotlib
"""

import argparse
import math

import torch
from torch import Tensor

import mpicoll as dist
from mpicoll.nn import Grid, halo_exchange

EXTENT = 32  # rows and columns of the whole field
FIELDS = 4
STEPS = 40  # of the optimizer


def most_square(size: int) -> tuple[int, int]:
    """Rows and columns of tiles for this number of ranks: (2, 2) for 4, (1, 2) for 2."""
    rows = max(rows for rows in range(1, math.isqrt(size) + 1) if size % rows == 0)
    return rows, size // rows


def warm_spots() -> Tensor:
    """Some temperature fields, smooth and periodic; the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    angle = torch.arange(EXTENT) * (2 * math.pi / EXTENT)
    fields = torch.zeros(FIELDS, 1, EXTENT, EXTENT)
    for field in fields:
        for row_wave in range(4):
            for column_wave in range(4):
                height, row_phase, column_phase = torch.rand(3, generator=generator) * 2 * math.pi
                field += height * torch.outer(
                    torch.sin(row_wave * angle + row_phase), torch.sin(column_wave * angle + column_phase)
                )
    return fields / fields.std()


def diffused(field: Tensor, steps: int = 3, rate: float = 0.2) -> Tensor:
    """What the network shall learn: each step, every point moves towards the mean of its four neighbours."""
    for _ in range(steps):
        around = sum(field.roll(shift, dim) for dim in (-2, -1) for shift in (-1, 1))
        field = field + rate * (around - 4 * field)
    return field


class Network(torch.nn.Module):
    """Three convolutions of 3x3 of a tile. They have no padding of their own: it comes from the neighbours."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(*channels, 3) for channels in ((1, 8), (8, 8), (8, 1)))

    def widened(self, x: Tensor) -> Tensor:
        """The tile with one row and one column more on each side (collective)."""
        for dim in (-2, -1):
            x = halo_exchange(x, self.grid, dim, width=1)
        return x

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        hidden = torch.tanh(first(self.widened(x)))
        hidden = torch.tanh(second(self.widened(hidden)))
        return x + third(self.widened(hidden))


def backward(network: Network, before: Tensor, after: Tensor) -> float:
    """The loss over the whole field; its gradients are in the parameters then, alike on all ranks (collective)."""
    # A rank's share of the loss: the sum over its tile by the size of the whole. All shares make the whole's mean.
    loss = (network(before) - after).square().sum() / (FIELDS * EXTENT**2)
    network.zero_grad()
    loss.backward()
    total = loss.detach()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    for summand in (total, *gradients):
        dist.all_reduce(summand, group=network.grid.group)
    return total.item()


def plot(path: str, tiles: tuple[int, ...], fields: dict[str, Tensor], losses: list[float]) -> None:
    """Draws the first of each of the fields, with the borders of the tiles, and the loss of each step."""
    from matplotlib.figure import Figure

    panels = (figure := Figure(figsize=(8, 5), layout="constrained")).subplot_mosaic([[*fields], ["loss"] * len(fields)])
    for name, field in fields.items():
        panels[name].imshow(field[0, 0], cmap="coolwarm", vmin=-3, vmax=3, interpolation="nearest")
        panels[name].set(title=name, xticks=[], yticks=[])
        for line, count in ((panels[name].axhline, tiles[0]), (panels[name].axvline, tiles[1])):
            for border in range(1, count):
                line(EXTENT * border / count - 0.5, color="black", linewidth=1)
    panels["loss"].semilogy(losses)
    panels["loss"].set(xlabel="step", ylabel="loss, all tiles")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", metavar="PNG", help="draw a field and the loss here")
    options = parser.parse_args()
    dist.init_process_group()
    torch.manual_seed(0)  # the same weights on every rank
    grid = Grid(most_square(dist.get_world_size()), periodic=True)  # over the last two dimensions of a tensor
    network = Network(grid)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    whole_before = warm_spots()
    whole_after = diffused(whole_before)
    before, after = grid.part(whole_before), grid.part(whole_after)

    losses = []
    for step in range(STEPS):
        losses.append(backward(network, before, after))
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step:>2}: loss {losses[-1]:.2e}")

    answer = grid.whole(network(before).detach())
    error = (answer - whole_after).abs().max().item()
    if dist.get_rank() == 0:
        if options.plot:
            fields = {"before": whole_before, "after 3 steps": whole_after, "the network's answer": answer}
            plot(options.plot, grid.shape, fields, losses)
        print(f"largest error of the last network, over the whole field: {error:.2f} standard deviations")
        tiles, fall = " x ".join(map(str, grid.shape)), losses[0] / losses[-1]
        print(f"halo_convolution: {tiles} tiles, the loss fell {fall:.0f}-fold in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
