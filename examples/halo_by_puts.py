# python -m mpicoll.run -n 2 examples/halo_by_puts.py
"""Heat on a ring of strips, one per rank: each rank puts its border rows into its neighbours' memory, and signals.

A window exposes the inbox of each rank: a row from above and one from below, for even and for odd steps. A rank that is early
puts the rows of step k + 1 while its neighbour still reads those of step k. It cannot come to step k + 2 before the neighbour
has signalled step k + 1, and so has read the rows of step k.

empty_shared lets ranks of one node copy straight into each other's inbox; between nodes MPI moves the rows. Any number of ranks.
"""

import torch
from torch import Tensor

import mpicoll as dist

ROWS, COLUMNS, STEPS = 64, 256, 100  # of a strip


def warmed(wide: Tensor) -> Tensor:
    """One step of all rows but the first and the last: each point moves towards the mean of its four neighbours."""
    inside = wide[1:-1]
    around = wide[:-2] + wide[2:] + inside.roll(1, 1) + inside.roll(-1, 1)
    return inside + 0.2 * (around - 4 * inside)


def simulate(strip: Tensor, steps: int) -> Tensor:
    """This rank's strip after some steps of the whole ring (collective)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    above, below = (rank - 1) % size, (rank + 1) % size
    inbox = dist.empty_shared(2, 2, COLUMNS, dtype=strip.dtype)
    with dist.Window(inbox) as window:
        for step in range(steps):
            upper, lower = (step % 2 * 2 * COLUMNS + side * COLUMNS for side in (0, 1))
            window.put(strip[0], above, lower)  # our first row is the row below our upper neighbour
            window.signal(above)
            window.put(strip[-1], below, upper)
            window.signal(below)
            window.wait_signal(below)
            window.wait_signal(above)
            halo = inbox[step % 2]
            strip = warmed(torch.cat([halo[:1], strip, halo[1:]]))
    return strip


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.rand(size * ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    strip = simulate(whole[rank * ROWS : (rank + 1) * ROWS].clone(), STEPS)
    for _ in range(STEPS):  # the same in one process
        whole = warmed(torch.cat([whole[-1:], whole, whole[:1]]))
    difference = (strip - whole[rank * ROWS : (rank + 1) * ROWS]).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"halo_by_puts: {STEPS} steps on {size} strips, largest difference from one process: {difference.item():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
