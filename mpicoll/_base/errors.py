"""The errors that need no torch; public as `mpicoll.errors`."""

from __future__ import annotations


class MpicollError(RuntimeError):
    """A failure at run time; the message names rank, group and operation. All errors here but UnsupportedReduction are one."""

    __module__ = "mpicoll.errors"  # which tracebacks and pickles name

    def __init_subclass__(cls) -> None:
        public = {"mpicoll._base": MpicollError.__module__, "mpicoll._launch": "mpicoll"}  # by package
        cls.__module__ = public.get(cls.__module__.rpartition(".")[0], cls.__module__)


class LaunchError(MpicollError):
    """The program was started in a way that cannot work; the message names the remedy, and ``mpicoll doctor`` finds more."""


class ThreadLevelError(MpicollError):
    """MPI was initialised below MPI_THREAD_SERIALIZED, or (MPICH) at different levels on the ranks.

    Let init_process_group initialise MPI, or import mpi4py.MPI without lowering mpi4py.rc.thread_level.
    """


class ConcurrentCollectives(MpicollError):
    """Two threads of a rank were in blocking collectives of one group at once.

    Their order would differ from rank to rank. Give each thread a group of its own (``new_group``).
    """


class CollectiveMismatch(MpicollError):
    """The calls of the ranks do not fit together: other collectives, other arguments, a message that does not fit its tensor.

    The base class of all such errors. The message has each rank's call, and what differs. Look for a branch that depends on the
    rank or on its data. MPICOLL_CHECK=1 compares the calls before anything moves, and a receiver then raises it for a message of
    another dtype, or a shorter one.
    """


class DifferentTensors(CollectiveMismatch, ValueError):
    """The tensors of the ranks do not fit together. All ranks raise it, before a tensor changes, and the group works on."""


class WorkerLeft(MpicollError):
    """A remote call to a worker that has left, or that left before it answered; the message names the worker.

    A worker leaves by ``shutdown(graceful=False)`` or when its process ends.
    """


class ForkedProcess(MpicollError):
    """A forked child tried to communicate; MPI belongs to the process that started it.

    DataLoader workers may compute. To start ranks use ``mpicoll run`` or ``mpicoll.spawn``.
    """


class UnsupportedReduction(TypeError, ValueError):
    """This reduction of this dtype has no right answer; nothing has been sent. The page "Reductions" has the table."""

    __module__ = MpicollError.__module__
