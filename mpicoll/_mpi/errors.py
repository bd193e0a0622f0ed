"""Turns MPI's errors into ours, in one place."""

from __future__ import annotations

from mpicoll._mpi.library import MPI
from mpicoll.errors import CommunicationError, TruncationError

MPIException = MPI.Exception


def translate(error: MPI.Exception, where: str) -> CommunicationError:
    """The mpicoll error for an MPI error.

    Args:   where: operation, group and rank, as the message should name them.
    """
    text = f"{where}: {error.Get_error_string()}"
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return TruncationError(text)
    return CommunicationError(text)


def truncated() -> MPI.Exception:
    """MPI's error for a message that is longer than its receive, where MPI itself was not asked."""
    return MPI.Exception(MPI.ERR_TRUNCATE)
