"""The errors of mpicoll.

    RuntimeError
    └── MpicollError            every failure at run time
        ├── LaunchError         no MPI, two MPIs, the wrong mpiexec, or MPI contradicts the environment
        ├── ThreadLevelError    MPI was initialised below MPI_THREAD_SERIALIZED, or (MPICH) at different levels on the ranks
        ├── CommunicationError  (also a DistBackendError) MPI itself returned an error
        │   └── PeerLost            ranks have died, and the job goes on (mpicoll.run --fault-tolerant)
        ├── OperationTimeout    (also a DistBackendError and a TimeoutError) an operation did not end in time; names operation,
        │                       group and rank
        ├── GroupFailed         (also a DistBackendError) the group was used after one of its operations had failed or timed out
        ├── GroupDestroyed      (also a DistError) the group was used after destroy_process_group
        ├── CollectiveMismatch  the calls of the ranks do not fit together: other collectives or arguments
        │   ├── DifferentTensors    (also a ValueError) tensors that do not fit together; all ranks raise it
        │   └── TruncationError     (also a CommunicationError) a message was longer than the tensor that should receive it
        ├── ConcurrentCollectives   two threads of a rank were in blocking collectives of one group at once
        ├── WorkerLeft          a remote call to a worker that has ended
        └── ForkedProcess       a forked child (a DataLoader worker, say) tried to communicate
    TypeError, ValueError
    └── UnsupportedReduction    a reduction that has no right answer for this dtype; raised before a byte moves

Bad arguments are a plain TypeError or ValueError, raised before a byte moves.

DistError and DistBackendError are classes of torch. The errors that derive from them are in mpicoll._base.group_errors, which is
imported on their first use: this module does not import torch.
"""

# ruff: noqa: F403, F405

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpicoll._base.errors import *

if TYPE_CHECKING:
    from mpicoll._base.group_errors import *
else:  # with this function, a name that is not there would be of type Any to a type checker

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("mpicoll._base.group_errors"), name)


__all__ = [
    "CollectiveMismatch", "CommunicationError", "ConcurrentCollectives", "DifferentTensors", "ForkedProcess", "GroupDestroyed",
    "GroupFailed", "LaunchError", "MpicollError", "OperationTimeout", "PeerLost", "ThreadLevelError", "TruncationError",
    "UnsupportedReduction", "WorkerLeft",
]  # fmt: skip
