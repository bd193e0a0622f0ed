"""The error tree.

    RuntimeError
    └── MpicollError            everything that goes wrong while running
        ├── LaunchError         MPI is missing, two MPIs, the wrong mpiexec, a contradiction between environment and MPI
        ├── ThreadLevelError    MPI was initialised with too little thread support (mpicoll needs SERIALIZED or more)
        ├── CommunicationError  MPI itself returned an error
        │   └── TruncationError     a message was longer than the tensor that should receive it
        ├── OperationTimeout    (also a TimeoutError) an operation did not end in time; names operation, group and rank
        ├── GroupFailed         the group was used after one of its operations had failed or timed out
        ├── GroupDestroyed      the group was used after destroy_process_group
        ├── WorkerLeft          a remote call to a worker that has ended
        └── ForkedProcess       a forked child (a DataLoader worker, say) tried to communicate
    TypeError, ValueError
    └── UnsupportedReduction    a dtype x reduction that has no right answer; raised before a byte moves

Bad arguments are a plain TypeError or ValueError, raised before a byte moves.
"""

from __future__ import annotations


class MpicollError(RuntimeError):
    """Something went wrong while running; the message names rank, group and operation."""


class LaunchError(MpicollError):
    """The program was started in a way that cannot work; the message names the remedy."""


class ThreadLevelError(MpicollError):
    """MPI was initialised below MPI_THREAD_SERIALIZED."""


class CommunicationError(MpicollError):
    """MPI returned an error; its text is in the message."""


class TruncationError(CommunicationError):
    """A message was longer than the tensor that should receive it."""


class OperationTimeout(MpicollError, TimeoutError):
    """An operation did not end within its time; the group is unusable afterwards."""


class GroupFailed(MpicollError):
    """The group was used after one of its operations had failed."""


class GroupDestroyed(MpicollError):
    """The group was used after it had been destroyed."""


class WorkerLeft(MpicollError):
    """A remote call to a worker that has left, or that left before it answered; names it."""


class ForkedProcess(MpicollError):
    """A forked child tried to communicate; MPI belongs to the process that started it."""


class UnsupportedReduction(TypeError, ValueError):
    """No right answer exists for this dtype and this reduction."""
