"""Converts MPI errors to mpicoll errors, in one place."""

from __future__ import annotations

from mpicoll._base.group_errors import CommunicationError, PeerLost, TruncationError
from mpicoll._base.waits import NOTICE_S
from mpicoll._mpi import survivors
from mpicoll._mpi.library import MPI

MPIException = MPI.Exception
LACKS = "Too many communicators", "context ID because of fragmentation"  # in MPICH's errors; the second: free ones differ by rank
MANY_GROUPS = 500  # from here on, an error of MPI while a group is made is taken as a lack of communicators


def translate(error: MPI.Exception, where: str) -> CommunicationError:
    """The mpicoll error for an MPI error. ``where`` names operation, group and rank."""
    what, *stack = error.Get_error_string().strip().splitlines()  # MPICH has a stack of its functions below
    text = f"{where}: {what.removesuffix(', error stack:')}" + (f": {stack[-1]}" if stack else "")
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return TruncationError(text)
    if lost := survivors.lost(NOTICE_S):  # whatever MPI says: after a death it has several errors, OTHER too
        return peer_lost(where, lost)
    return CommunicationError(text)


def not_made(error: MPI.Exception, where: str, groups: int | None = None) -> CommunicationError:
    """The mpicoll error for an MPI error while a communicator was made. ``groups``: number of open groups; None: unknown."""
    if lost := survivors.lost(NOTICE_S):
        return peer_lost(where, lost)
    reason = error.Get_error_string().strip().splitlines()[-1]
    text = f"{where}: MPI could not make the communicator: {reason}"
    remedy = "destroy groups that you no longer need, destroy_process_group(group)"
    if groups is None:
        text += f". If there are no more communicators: {remedy}"
    elif groups >= MANY_GROUPS or any(word in reason for word in LACKS):
        text += f". This process has {groups} open groups: {remedy}"
    return CommunicationError(text)


def peer_lost(where: str, ranks: tuple[int, ...]) -> PeerLost:
    """The error for an operation that cannot end because these ranks of the world have died."""
    names = ", ".join(map(str, ranks))
    error = PeerLost(f"{where}: rank {names} {'has' if len(ranks) == 1 else 'have'} died; mpicoll.shrink() leaves out the dead")
    error.ranks = ranks
    return error


def truncated() -> MPI.Exception:
    """The MPI error for a message that is longer than its receive, raised where mpicoll compares the lengths itself."""
    return MPI.Exception(MPI.ERR_TRUNCATE)
