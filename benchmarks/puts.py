"""Times a put with its signal between the first two ranks: of a Window, and of MPI alone through mpi4py.

    python -m mpicoll.run -n 2 -m benchmarks.puts            BYTES...; default: 8, 64 KiB, 4 MiB

One rank puts and signals, the other one waits and does the same: half of a round trip. MPI alone: Put, Flush, and a message of
one byte. The ways alternate; each line has the least and the median time. Results are checked. "mapped": tensors of empty_shared.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from mpi4py import MPI

import mpicoll as dist

ROUNDS, TURNS = 400, 4


def by_window(window: dist.Window, tensor: torch.Tensor, rank: int) -> None:
    for turn in range(TURNS):
        if turn % 2 == rank:
            window.put(tensor, 1 - rank)
            window.signal(1 - rank)
        else:
            window.wait_signal(1 - rank)


def by_mpi(window: MPI.Win, comm: MPI.Intracomm, tensor: torch.Tensor, rank: int) -> None:
    token, memory = bytearray(1), tensor.numpy()
    for turn in range(TURNS):
        if turn % 2 == rank:
            window.Put([memory, MPI.BYTE], 1 - rank)
            window.Flush(1 - rank)
            comm.Send([token, MPI.BYTE], 1 - rank)
        else:
            comm.Recv([token, MPI.BYTE], 1 - rank)


def measure(nbytes: int, rank: int) -> None:
    comm = dist.get_comm()
    tensor, exposed = torch.full((nbytes,), rank + 1, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    raw = MPI.Win.Create(exposed.numpy(), 1, comm=comm)
    raw.Lock_all(MPI.MODE_NOCHECK)
    with (
        dist.Window(torch.zeros(nbytes, dtype=torch.uint8)) as own,
        dist.Window(dist.empty_shared(nbytes, dtype=torch.uint8)) as mapped,
    ):
        ways: dict[str, Callable[[], None]] = {
            "MPI": lambda: by_mpi(raw, comm, tensor, rank),
            "Window": lambda: by_window(own, tensor, rank),
            "Window, mapped": lambda: by_window(mapped, tensor, rank),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                comm.Barrier()
                began = time.perf_counter()
                way()
                times[name].append((time.perf_counter() - began) / TURNS * 1e6)
        dist.barrier()
        for result in (exposed, own.tensor, mapped.tensor):
            assert result.eq(2 - rank).all()
    raw.Unlock_all()
    raw.Free()
    if rank == 0:
        for name, found in times.items():
            print(
                f"{nbytes:>8} bytes  {name:<15} {min(found):9.1f} us at least, median {statistics.median(found):9.1f}", flush=True
            )


def main() -> None:
    dist.init_process_group()
    for nbytes in map(int, sys.argv[1:] or ("8", "65536", "4194304")):
        measure(nbytes, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
