"""The error tree.

    RuntimeError
    └── MpicollError            everything that goes wrong while running
        ├── LaunchError         MPI is missing, two MPIs, the wrong mpiexec, a contradiction between environment and MPI
        ├── ThreadLevelError    MPI was initialised with too little thread support (mpicoll needs SERIALIZED or more)
        ├── CommunicationError  (also a DistBackendError) MPI itself returned an error
        │   └── TruncationError     a message was longer than the tensor that should receive it
        ├── OperationTimeout    (also a DistBackendError and a TimeoutError) an operation did not end in time; names operation,
        │                       group and rank
        ├── GroupFailed         (also a DistBackendError) the group was used after one of its operations had failed or timed out
        ├── GroupDestroyed      (also a DistError) the group was used after destroy_process_group
        ├── ConcurrentCollectives   two threads of a rank were in blocking collectives of one group at once
        ├── WorkerLeft          a remote call to a worker that has ended
        └── ForkedProcess       a forked child (a DataLoader worker, say) tried to communicate
    TypeError, ValueError
    └── UnsupportedReduction    a dtype x reduction that has no right answer; raised before a byte moves

Bad arguments are a plain TypeError or ValueError, raised before a byte moves.

DistError and DistBackendError are torch's. The errors that have them as a base are in mpicoll._failures, which is imported when
one of them is asked for: this module does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpicoll._failures import CommunicationError as CommunicationError
    from mpicoll._failures import GroupDestroyed as GroupDestroyed
    from mpicoll._failures import GroupFailed as GroupFailed
    from mpicoll._failures import OperationTimeout as OperationTimeout
    from mpicoll._failures import TruncationError as TruncationError

_FAILURES = frozenset({"CommunicationError", "GroupDestroyed", "GroupFailed", "OperationTimeout", "TruncationError"})


def __getattr__(name: str) -> Any:
    if name not in _FAILURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("mpicoll._failures"), name)


class MpicollError(RuntimeError):
    """Something went wrong while running; the message names rank, group and operation."""


class LaunchError(MpicollError):
    """The program was started in a way that cannot work; the message names the remedy."""


class ThreadLevelError(MpicollError):
    """MPI was initialised below MPI_THREAD_SERIALIZED."""


class ConcurrentCollectives(MpicollError):
    """Two threads of a rank were in blocking collectives of one group at once; each thread needs a group of its own."""


class WorkerLeft(MpicollError):
    """A remote call to a worker that has left, or that left before it answered; names it."""


class ForkedProcess(MpicollError):
    """A forked child tried to communicate; MPI belongs to the process that started it."""


class UnsupportedReduction(TypeError, ValueError):
    """No right answer exists for this dtype and this reduction."""
