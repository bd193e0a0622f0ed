"""Converts MPI errors to mpicoll errors, in one place."""

from __future__ import annotations

from mpicoll._mpi.library import MPI
from mpicoll.errors import CommunicationError, TruncationError

MPIException = MPI.Exception
MANY_GROUPS = 500  # from here on, an error of MPI while a group is made is taken as a lack of communicators


def translate(error: MPI.Exception, where: str) -> CommunicationError:
    """The mpicoll error for an MPI error. ``where`` names operation, group and rank."""
    text = f"{where}: {error.Get_error_string()}"
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return TruncationError(text)
    return CommunicationError(text)


def not_made(error: MPI.Exception, where: str, groups: int) -> CommunicationError:
    """The mpicoll error for an MPI error while a group was made. ``groups``: number of open groups of this process."""
    reason = error.Get_error_string().strip().splitlines()[-1]
    text = f"{where}: MPI could not make the communicator: {reason}"
    if groups >= MANY_GROUPS or "communicators" in reason:
        text += f". This process has {groups} open groups: destroy groups that you no longer need, destroy_process_group(group)"
    return CommunicationError(text)


def truncated() -> MPI.Exception:
    """The MPI error for a message that is longer than its receive, raised where mpicoll compares the lengths itself."""
    return MPI.Exception(MPI.ERR_TRUNCATE)
