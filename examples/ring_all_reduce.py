# python -m mpicoll.run -n 2 examples/ring_all_reduce.py
"""A ring all-reduce written by hand from isend and irecv, next to all_reduce: same sum, how much slower?

The vector is cut into n chunks, one per rank. Everybody passes a chunk to the right and takes one from the left:

    [1] reduce-scatter, n - 1 steps: what arrives is added; then rank r holds the whole sum of chunk r + 1
    [2] all-gather,     n - 1 steps: what arrives is kept; the finished chunks go round once

    3 ranks, sums written as the ranks that are in them:
                   rank 0          rank 1          rank 2
    start          0   0   0       1   1   1       2   2   2
    after [1]      0   012 02      01  1   012     012 12  2
    after [2]      012 012 012     012 012 012     012 012 012

Each rank sends 2 (n - 1) / n of the vector, less than twice its length however many ranks there are: that is why rings
are used for long vectors.

The two may add in different orders: the sums of float32 numbers differ in their last bits. Any number of ranks.
"""

import math
import time
from collections.abc import Callable

import torch

import mpicoll as dist

COUNTS = (1_000, 100_000, 1_000_000)  # float32 elements
REPEAT = 5


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sums ``tensor`` over all ranks, in place (collective). ``tensor``: one-dimensional, contiguous, any length."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = tensor.tensor_split(size)  # views; lengths differ by one at most
    inbox = torch.empty_like(chunks[0])  # chunk 0 is never the shorter one

    for step in range(size - 1):  # [1]
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        arrived = inbox[: len(incoming)]
        exchange(outgoing, right, arrived, left)
        incoming += arrived
    for step in range(size - 1):  # [2]
        outgoing, incoming = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
        exchange(outgoing, right, incoming, left)


def exchange(outgoing: torch.Tensor, right: int, incoming: torch.Tensor, left: int) -> None:
    """Sends to the right while receiving from the left. Blocking sends in a ring would wait for each other for ever."""
    receiving = dist.irecv(incoming, src=left)
    sending = dist.isend(outgoing, dst=right)
    receiving.wait()
    sending.wait()


def measure(reduce: Callable[[torch.Tensor], object], mine: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The reduced copy of ``mine``, and the best time of a few runs in seconds (that of the slowest rank)."""
    result, best = mine.clone(), float("inf")
    reduce(result.clone())  # warm up
    for _ in range(REPEAT):
        result.copy_(mine)
        dist.barrier()
        start = time.perf_counter()
        reduce(result)
        best = min(best, time.perf_counter() - start)
    slowest = torch.tensor(best)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return result, slowest.item()


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{size} rank(s), best of {REPEAT}")
        print(f"{'float32':>10} | {'ring ms':>9} {'all_reduce ms':>14} | {'largest relative difference':>27}")
    ring_s = mpi_s = math.nan
    for count in COUNTS:
        mine = torch.rand(count, generator=torch.Generator().manual_seed(rank)) + 1
        by_ring, ring_s = measure(ring_all_reduce, mine)
        by_mpi, mpi_s = measure(dist.all_reduce, mine)

        if rank == 0:
            difference = ((by_ring - by_mpi).abs() / by_mpi).max().item()
            print(f"{count:>10} | {ring_s * 1e3:>9.3f} {mpi_s * 1e3:>14.3f} | {difference:>27.1e}")
    if rank == 0:
        print(f"ring_all_reduce: {ring_s / mpi_s:.1f} times the time of all_reduce with {COUNTS[-1]:,} numbers")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
