"""What benchmarks agree on and wait by, beside what is under test: a communicator of its own, plain mpi4py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from mpicoll._mpi import runtime
from mpicoll._mpi.library import MPI

Value = TypeVar("Value")
NAPS_S = (20e-6, 2e-3)  # seconds between two looks: at first, and at most


class ControlChannel:
    """Between measurements only: everything but ``arrive`` may take a core while it waits. All of it is collective."""

    def __init__(self) -> None:
        there = runtime.start()
        self.comm = there.base.Dup()
        self.rank, self.size = there.rank, there.size
        self.library = there.library
        self._runtime = there

    @property
    def place(self) -> int:
        """This rank's number on its host."""
        return self._runtime.local_rank

    def arrive(self) -> None:
        """Returns, within 2 ms, once every rank is here; sleeps until then, since who spins takes a core from who works."""
        request = self.comm.Ibarrier()
        nap = NAPS_S[0]
        while not request.Test():
            time.sleep(nap)
            nap = min(2 * nap, NAPS_S[1])

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Elementwise, over all ranks; as many on each."""
        self.arrive()
        found = np.array(seconds, dtype=np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return [float(value) for value in found]

    def first(self, value: Value) -> Value:
        """Rank 0's; it must pickle."""
        self.arrive()
        found: Value = self.comm.bcast(value, root=0)
        return found

    def all(self, value: Value) -> list[Value]:
        """Every rank's, by rank; they must pickle."""
        self.arrive()
        return self.comm.allgather(value)

    def close(self) -> None:
        self.comm.Free()
