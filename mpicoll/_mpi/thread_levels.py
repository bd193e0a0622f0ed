"""The MPI thread levels of the ranks of a communicator.

Open MPI works with different levels on different ranks. MPICH does not: after five blocking collectives on a communicator it
uses shared memory for them, but only below MPI_THREAD_MULTIPLE. So ranks with different levels use different algorithms: they
wait for ever, receive wrong data or abort. Non-blocking calls do not avoid this, because MPICH itself uses these collectives to
make a communicator.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll._base.errors import ThreadLevelError
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

NAMES = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}


def serialized_anywhere(runtime: Runtime, comm: MPI.Intracomm) -> bool:
    """Returns whether MPI is serialized on any rank of the communicator (collective, unless all levels are known).

    Raises:
        ThreadLevelError: On all ranks, if their levels differ and the MPI library is not Open MPI.
    """
    levels: Sequence[int] = runtime.thread_levels
    if not levels or len(set(levels)) > 1:  # unknown, or other ranks of the world may have the lower ones
        with runtime.lock:
            # Not allreduce of objects, for which mpi4py makes another communicator.
            levels = comm.allgather(runtime.thread_level)
        check(levels)
    return any(level < MPI.THREAD_MULTIPLE for level in levels)


def check(levels: Sequence[int]) -> None:
    """Raises ThreadLevelError if the levels of a communicator's ranks differ and the MPI library is not Open MPI."""
    vendor, version = MPI.get_vendor()
    if len(set(levels)) > 1 and vendor != "Open MPI":
        different = next(rank for rank, level in enumerate(levels) if level != levels[0])
        raise ThreadLevelError(
            f"MPI was initialised at {NAMES[levels[0]]} on rank 0 and at {NAMES[levels[different]]} on rank {different}, and "
            f"{vendor} {'.'.join(map(str, version))} then uses different algorithms on them. Set the same "
            "mpi4py.rc.thread_level (or MPI4PY_RC_THREAD_LEVEL) on all ranks"
        )
