"""The control channel of benchmarks: a communicator of its own (plain mpi4py), separate from the code that is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from mpicoll._mpi import runtime
from mpicoll._mpi.library import MPI

Value = TypeVar("Value")
FIRST_NAP_S, LONGEST_NAP_S = 20e-6, 2e-3  # between two tests


class ControlChannel:
    """Synchronises ranks between measurements (all methods are collective). Methods other than ``arrive`` may wait busily."""

    def __init__(self) -> None:
        world = runtime.start()
        self.comm = world.base.Dup()
        self.rank, self.size, self.local_rank = world.rank, world.size, world.local_rank
        self.library = world.library

    def arrive(self) -> None:
        """Returns within 2 ms after every rank has called it.

        Sleeps while waiting, because spinning would take a core from a rank that is working.
        """
        request, nap_s = self.comm.Ibarrier(), FIRST_NAP_S
        while not request.Test():
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The elementwise maximum over all ranks, which bring equally many."""
        self.arrive()
        maxima = np.array(seconds, dtype=np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, maxima, MPI.MAX)
        return [float(value) for value in maxima]

    def first(self, value: Value) -> Value:
        """The value of rank 0, which must be picklable."""
        self.arrive()
        received: Value = self.comm.bcast(value, root=0)
        return received

    def all(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank; they must be picklable."""
        self.arrive()
        return self.comm.allgather(value)

    def close(self) -> None:
        self.comm.Free()
