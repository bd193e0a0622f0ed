"""get_comm: the mpi4py communicator of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup

from mpicoll._api import groups
from mpicoll._c10d import dynamo

if TYPE_CHECKING:
    from mpi4py import MPI


def get_comm(group: ProcessGroup | None = None) -> MPI.Intracomm:
    """Returns an mpi4py communicator of the group's ranks, for MPI calls of the program's own.

    The first call for a group is collective: all its ranks call it, in the same order as their other collectives. Later calls
    return the same communicator and need no other rank. Ranks are numbered as in the group.

    It is a duplicate that mpicoll itself does not use, so that the program's messages and mpicoll's never meet. It ends with the
    group: `destroy_process_group` frees it.

    If MPI runs at MPI_THREAD_SERIALIZED, no asynchronous operation of mpicoll may be under way while the program calls MPI.

    Args:
        group: None means the default group.

    Raises:
        ValueError: This rank is not in the group, the group has another backend or has been destroyed, or there is no default
            group.

    Example:
        >>> comm = dist.get_comm()
        >>> comm.allreduce(comm.Get_rank() + 1)
        3
    """
    communicator = groups.without_torch("get_comm", group)
    if communicator is None:
        raise ValueError("get_comm: this rank is not in the group")
    return communicator.get_comm()  # type: ignore[no-any-return]


dynamo.disable(get_comm)
