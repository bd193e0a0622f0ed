"""Tries whether MPI can send GPU memory between two ranks. It is a job of its own, because a wrong claim ends in a crash.

    mpiexec -n 2 python .../mpicoll/_launch/find/probe_cuda.py

It is run as a script, by path. It needs no torch: it calls the CUDA driver (libcuda) by ctypes. Rank 0 prints a line before each
trial and one after it, which names a trial that crashed. `mpicoll._launch.find.cuda_support` reads these lines.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

BEGUN, PASSED, WRONG = "MPICOLL_CUDA_BEGUN ", "MPICOLL_CUDA_PASSED ", "MPICOLL_CUDA_WRONG "
SMALL, LARGE = 8, 4 << 20  # bytes: an eager and a rendezvous message


class Cuda:
    """Memory of GPU ``device``, modulo the number of visible GPUs: ranks may share one."""

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        count, handle, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self._call("cuDeviceGet", ctypes.byref(handle), device % max(count.value, 1))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} answers {status}")

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def put(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def get(self, address: int, nbytes: int) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return data.raw


class Trials:
    """Operations between ranks 0 and 1 of ``comm``. Each returns the bytes that this rank must have received."""

    def __init__(self, comm: Any, driver: Cuda) -> None:
        from mpi4py import MPI

        self.mpi, self.comm, self.rank, self.other = MPI, comm, comm.Get_rank(), 1 - comm.Get_rank()
        self.driver = driver
        self.sent, self.received = driver.allocate(2 * LARGE), driver.allocate(2 * LARGE)

    def all(self) -> dict[str, Callable[[], bytes]]:
        """The trials by name, the least demanding first."""
        return {
            "send 8 bytes": lambda: self.send(SMALL),
            "send 4 MiB": lambda: self.send(LARGE),
            "isend and irecv": self.pending,
            "broadcast": self.broadcast,
            "all_gather": self.all_gather,
            "all_gather of uneven sizes": self.all_gather_uneven,
        }

    def passes(self, trial: Callable[[], bytes]) -> bool:
        """Whether all ranks have received the right bytes (collective)."""
        self.comm.Barrier()
        self.driver.put(self.sent, pattern(self.rank, LARGE))
        self.driver.put(self.received, bytes(2 * LARGE))
        expected = trial()
        return bool(self.comm.allreduce(self.driver.get(self.received, len(expected)) == expected, op=self.mpi.LAND))

    def send(self, nbytes: int) -> bytes:
        """A round trip."""
        if self.rank == 0:
            self.comm.Send(self.part(self.sent, nbytes), self.other)
            self.comm.Recv(self.part(self.received, nbytes), self.other)
        else:
            self.comm.Recv(self.part(self.received, nbytes), self.other)
            self.comm.Send(self.part(self.sent, nbytes), self.other)
        return pattern(self.other, nbytes)

    def pending(self) -> bytes:
        """Both directions at once, tested until they end."""
        requests = [
            self.comm.Irecv(self.part(self.received, LARGE), self.other),
            self.comm.Isend(self.part(self.sent, LARGE), self.other),
        ]
        while not self.mpi.Request.Testall(requests):
            pass
        return pattern(self.other, LARGE)

    def broadcast(self) -> bytes:
        self.comm.Bcast(self.part(self.sent if self.rank == 0 else self.received, LARGE), 0)
        return bytes(LARGE) if self.rank == 0 else pattern(0, LARGE)  # rank 0 receives nothing

    def all_gather(self) -> bytes:
        target = [self.mpi.buffer.fromaddress(self.received, 2 * LARGE), LARGE, self.mpi.BYTE]
        self.comm.Allgather(self.part(self.sent, LARGE), target)
        return pattern(0, LARGE) + pattern(1, LARGE)

    def all_gather_uneven(self) -> bytes:
        counts = [LARGE, LARGE // 2]
        target = [self.mpi.buffer.fromaddress(self.received, sum(counts)), counts, self.mpi.BYTE]
        self.comm.Allgatherv(self.part(self.sent, counts[self.rank]), target)
        return pattern(0, counts[0]) + pattern(1, counts[1])

    def part(self, address: int, nbytes: int) -> list[Any]:
        return [self.mpi.buffer.fromaddress(address, nbytes), nbytes, self.mpi.BYTE]


def pattern(rank: int, nbytes: int) -> bytes:
    """Bytes that tell the rank."""
    return bytes([1 + rank, 7, 3, 2 + rank, 9, 5 + rank, 1, 4]) * (nbytes // 8)


def run(comm: Any, driver: Cuda) -> None:
    """Runs all trials (collective) and prints the results on rank 0."""
    trials = Trials(comm, driver)
    for name, trial in trials.all().items():
        if trials.rank == 0:
            print(BEGUN + name, flush=True)
        passed = trials.passes(trial)
        if trials.rank == 0:
            print((PASSED if passed else WRONG) + name, flush=True)


def main() -> None:
    # The GPU context comes before MPI: some libraries look for one when they start.
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_RANK")
    place = next((os.environ[name] for name in names if name in os.environ), "0")
    driver = Cuda(int(place))
    from mpi4py import MPI

    run(MPI.COMM_WORLD, driver)


if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != os.path.dirname(os.path.abspath(__file__))]
    main()
