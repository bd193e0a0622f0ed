"""Converts MPI errors to mpicoll errors, in one place."""

from __future__ import annotations

from mpicoll._mpi.library import MPI
from mpicoll.errors import CommunicationError, TruncationError

MPIException = MPI.Exception


def translate(error: MPI.Exception, where: str) -> CommunicationError:
    """The mpicoll error for an MPI error. ``where`` names operation, group and rank."""
    text = f"{where}: {error.Get_error_string()}"
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return TruncationError(text)
    return CommunicationError(text)


def truncated() -> MPI.Exception:
    """The MPI error for a message that is longer than its receive, raised where mpicoll compares the lengths itself."""
    return MPI.Exception(MPI.ERR_TRUNCATE)
