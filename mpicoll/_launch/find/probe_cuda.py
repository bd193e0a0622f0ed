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
from typing import Any, Protocol

BEGUN, PASSED, WRONG = "MPICOLL_CUDA_BEGUN ", "MPICOLL_CUDA_PASSED ", "MPICOLL_CUDA_WRONG "
SMALL, LARGE = 8, 4 << 20  # bytes: an eager and a rendezvous message


class Driver(Protocol):
    """Allocates, writes and reads GPU memory."""

    def allocate(self, nbytes: int) -> int: ...

    def put(self, address: int, data: bytes) -> None: ...

    def get(self, address: int, nbytes: int) -> bytes: ...


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
    """Operations between ranks 0 and 1 of ``comm``. Each returns whether this rank has received the right bytes."""

    def __init__(self, comm: Any, driver: Driver) -> None:
        from mpi4py import MPI

        self.mpi, self.comm, self.rank = MPI, comm, comm.Get_rank()
        self.driver = driver
        self.sent, self.received = driver.allocate(2 * LARGE), driver.allocate(2 * LARGE)

    def all(self) -> dict[str, Callable[[], bool]]:
        """The trials by name, the least demanding first."""
        return {
            "send 8 bytes": lambda: self.send(SMALL),
            "send 4 MiB": lambda: self.send(LARGE),
            "isend and irecv": self.pending,
            "broadcast": self.broadcast,
            "all_gather": self.all_gather,
            "all_gather of uneven sizes": self.all_gather_uneven,
            "all_reduce": self.all_reduce,
        }

    def send(self, nbytes: int) -> bool:
        """A round trip."""
        self.prepare(nbytes)
        other = 1 - self.rank
        if self.rank == 0:
            self.comm.Send(self.bytes(self.sent, nbytes), other)
            self.comm.Recv(self.bytes(self.received, nbytes), other)
        else:
            self.comm.Recv(self.bytes(self.received, nbytes), other)
            self.comm.Send(self.bytes(self.sent, nbytes), other)
        return self.driver.get(self.received, nbytes) == pattern(other, nbytes)

    def pending(self) -> bool:
        """Both directions at once, tested until they end."""
        self.prepare(LARGE)
        other = 1 - self.rank
        requests = [
            self.comm.Irecv(self.bytes(self.received, LARGE), other),
            self.comm.Isend(self.bytes(self.sent, LARGE), other),
        ]
        while not self.mpi.Request.Testall(requests):
            pass
        return self.driver.get(self.received, LARGE) == pattern(other, LARGE)

    def broadcast(self) -> bool:
        self.prepare(LARGE)
        self.comm.Bcast(self.bytes(self.sent if self.rank == 0 else self.received, LARGE), 0)
        return self.rank == 0 or self.driver.get(self.received, LARGE) == pattern(0, LARGE)

    def all_gather(self) -> bool:
        self.prepare(LARGE)
        self.comm.Allgather(self.bytes(self.sent, LARGE), [*self.bytes(self.received, 2 * LARGE)[:1], LARGE, self.mpi.BYTE])
        return self.driver.get(self.received, 2 * LARGE) == pattern(0, LARGE) + pattern(1, LARGE)

    def all_gather_uneven(self) -> bool:
        self.prepare(LARGE)
        counts = [LARGE, LARGE // 2]
        target = [self.mpi.buffer.fromaddress(self.received, sum(counts)), counts, self.mpi.BYTE]
        self.comm.Allgatherv(self.bytes(self.sent, counts[self.rank]), target)
        return self.driver.get(self.received, sum(counts)) == pattern(0, counts[0]) + pattern(1, counts[1])

    def all_reduce(self) -> bool:
        """The library's own sum of GPU memory."""
        self.prepare(LARGE)
        count = LARGE // 4
        sent, received = (self.mpi.buffer.fromaddress(address, LARGE) for address in (self.sent, self.received))
        self.comm.Allreduce([sent, count, self.mpi.INT32_T], [received, count, self.mpi.INT32_T], self.mpi.SUM)
        sums = memoryview(self.driver.get(self.received, LARGE)).cast("i")
        parts = [memoryview(pattern(rank, LARGE)).cast("i") for rank in (0, 1)]
        return all(sums[i] == parts[0][i] + parts[1][i] for i in (0, 1, count // 2, count - 1))

    def prepare(self, nbytes: int) -> None:
        self.driver.put(self.sent, pattern(self.rank, nbytes))
        self.driver.put(self.received, bytes(2 * LARGE))

    def bytes(self, address: int, nbytes: int) -> list[Any]:
        return [self.mpi.buffer.fromaddress(address, nbytes), nbytes, self.mpi.BYTE]


def pattern(rank: int, nbytes: int) -> bytes:
    """Bytes that tell the rank. Two of its int32 values add up without overflow."""
    return bytes([1 + rank, 7, 3, 2 + rank, 9, 5 + rank, 1, 4]) * (nbytes // 8)


def run(comm: Any, driver: Driver) -> None:
    """Runs all trials (collective) and prints the results on rank 0."""
    from mpi4py import MPI

    for name, trial in Trials(comm, driver).all().items():
        if comm.Get_rank() == 0:
            print(BEGUN + name, flush=True)
        comm.Barrier()
        right = comm.allreduce(trial(), op=MPI.LAND)
        if comm.Get_rank() == 0:
            print((PASSED if right else WRONG) + name, flush=True)


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
