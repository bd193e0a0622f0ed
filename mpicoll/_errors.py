"""The errors that need no torch; public as `mpicoll.errors`."""

from __future__ import annotations


class MpicollError(RuntimeError):
    """A failure at run time; the message names rank, group and operation."""


class LaunchError(MpicollError):
    """The program was started in a way that cannot work; the message names the remedy."""


class ThreadLevelError(MpicollError):
    """MPI was initialised below MPI_THREAD_SERIALIZED."""


class ConcurrentCollectives(MpicollError):
    """Two threads of a rank were in blocking collectives of one group at once; each thread needs a group of its own."""


class CollectiveMismatch(MpicollError):
    """The ranks called different collectives, or one with different arguments; the message has each rank's call."""


class WorkerLeft(MpicollError):
    """A remote call to a worker that has left, or that left before it answered; the message names the worker."""


class ForkedProcess(MpicollError):
    """A forked child tried to communicate; MPI belongs to the process that started it."""


class UnsupportedReduction(TypeError, ValueError):
    """This reduction of this dtype has no right answer."""


# Tracebacks and pickles name the public module.
for _error in (
    MpicollError, LaunchError, ThreadLevelError, CollectiveMismatch, ConcurrentCollectives, WorkerLeft, ForkedProcess,
    UnsupportedReduction,
):  # fmt: skip
    _error.__module__ = "mpicoll.errors"
