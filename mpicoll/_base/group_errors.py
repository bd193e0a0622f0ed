"""The errors of a group; public as `mpicoll.errors`. They are errors of torch too, so programs that catch those catch these.

They have a module of their own because it imports torch; `import mpicoll` and the launcher do not.
"""

from __future__ import annotations

from torch.distributed import DistBackendError, DistError

from mpicoll._base.errors import CollectiveMismatch, MpicollError


class CommunicationError(MpicollError, DistBackendError):
    """MPI returned an error; its text is in the message. The group cannot be used any more."""


class TruncationError(CommunicationError, CollectiveMismatch):
    """A message, or a rank's part of a collective, was longer than the tensor that should receive it."""


class PeerLost(CommunicationError):
    """Ranks have died, and the job goes on without them: Open MPI under ``mpicoll.run --fault-tolerant``.

    Attributes:
        ranks: All ranks of the world that have died so far.
    """

    ranks: tuple[int, ...] = ()


class OperationTimeout(MpicollError, DistBackendError, TimeoutError):
    """An operation did not end within its time; the message names the ranks that have not come, with their last call.

    MPI cannot cancel, so the group cannot be used any more. The limit is the timeout of init_process_group.
    """


class GroupFailed(MpicollError, DistBackendError):
    """The group was used after one of its operations had failed or timed out. The first failure has the cause."""


class GroupDestroyed(MpicollError, DistError):
    """The group was used after destroy_process_group, or after ``shrink`` had made a new world."""
