"""The errors of a group; public as `mpicoll.errors`. They are errors of torch too, so programs that catch those catch these.

They have a module of their own because it imports torch; `import mpicoll` and the launcher do not.
"""

from __future__ import annotations

from torch.distributed import DistBackendError, DistError

from mpicoll._errors import MpicollError


class CommunicationError(MpicollError, DistBackendError):
    """MPI returned an error; its text is in the message."""


class TruncationError(CommunicationError):
    """A message was longer than the tensor that should receive it."""


class PeerLost(CommunicationError):
    """Ranks have died, and the job goes on without them: Open MPI under ``mpicoll.run --fault-tolerant``.

    Attributes:
        ranks: All ranks of the world that have died so far.
    """

    ranks: tuple[int, ...] = ()


class OperationTimeout(MpicollError, DistBackendError, TimeoutError):
    """An operation did not end within its time; the group is unusable afterwards."""


class GroupFailed(MpicollError, DistBackendError):
    """The group was used after one of its operations had failed."""


class GroupDestroyed(MpicollError, DistError):
    """The group was used after it had been destroyed."""


# Tracebacks and pickles name the public module.
for _error in (CommunicationError, PeerLost, TruncationError, OperationTimeout, GroupFailed, GroupDestroyed):
    _error.__module__ = "mpicoll.errors"
