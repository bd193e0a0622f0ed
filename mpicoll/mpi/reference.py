"""The MPI call alone, as one would write it with mpi4py and NumPy: what benchmarks compare with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI


def all_reduce(array: np.ndarray) -> Callable[[], None]:
    """A call that sums ``array`` over MPI.COMM_WORLD in place (collective)."""

    def call() -> None:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)

    return call
