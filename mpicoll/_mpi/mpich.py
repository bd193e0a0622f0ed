"""A fault of MPICH 4.0, and the way around it.

# Note [MPI_Reduce in place]
MPICH 4.0.2 (Debian 12) ends with SIGSEGV in MPI_Reduce of some KiB, if the root passes MPI_IN_PLACE and is not rank 0. So the
root passes a copy there. MPICH 5.0.2 and Intel MPI 2021.18 have no such fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll._mpi.library import MPI

_VENDOR, _VERSION = MPI.get_vendor()
FAULTY = _VENDOR == "MPICH" and _VERSION[:2] == (4, 0)


def at_any_root(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """The Reduce or Ireduce of a communicator, which takes MPI_IN_PLACE at any root."""
    if not FAULTY:
        return reduce

    def call(source: Any, target: Any, op: Any, root: int) -> Any:
        if source is MPI.IN_PLACE and root != 0:
            memory, *count_and_datatype = target
            source = [bytes(memory), *count_and_datatype]
        return reduce(source, target, op, root)  # a request keeps the copy

    return call
