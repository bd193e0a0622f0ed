"""Aborts the job after an uncaught exception on one rank: prints the exception, flushes the output, and calls MPI_Abort.

Plain ``python`` hangs in that case under both Open MPI and MPICH: the failing rank waits in MPI_Finalize, and the other ranks
wait in the operation that it never reached.

# Note [Only a killed rank is noticed]
In a job that goes on when a rank dies, a failed rank ends alone. Open MPI notices at once if a signal has killed it, and after 10
to 20 s, or never, if it ended by exit or MPI_Abort.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from mpicoll._base import frames, last_words
from mpicoll._base.waits import ABORT_S, FORWARDING_S
from mpicoll._mpi import runtime

_os_exit = os._exit
_before: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def install() -> None:
    """Chains our hooks in front of sys.excepthook and threading.excepthook. A second call does nothing."""
    global _before
    if _before is None:
        _before = (sys.excepthook, threading.excepthook)
        sys.excepthook = _excepthook
        threading.excepthook = _thread_excepthook
        from mpicoll._mpi import survivors

        if survivors.possible():
            os._exit = _exit


def uninstall() -> bool:
    """Restores the previous hooks, unless other code has chained a hook in front of these. Returns whether it did."""
    global _before
    if _before is None or sys.excepthook is not _excepthook or threading.excepthook is not _thread_excepthook:
        return False
    sys.excepthook, threading.excepthook = _before
    os._exit = _os_exit
    _before = None
    return True


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    hook = _before[0] if _before else sys.__excepthook__
    try:
        frames.shorten(error)
        hook(kind, error, trace)
    finally:
        abort(f"uncaught {kind.__name__}")


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    hook = _before[1] if _before else threading.__excepthook__
    try:
        if args.exc_value is not None:
            frames.shorten(args.exc_value)
        hook(args)
    finally:
        if args.exc_type is not SystemExit:
            thread = args.thread.name if args.thread else "?"
            abort(f"uncaught {args.exc_type.__name__} in thread {thread}", f"{args.exc_type.__name__}: {args.exc_value}")


def _exit(status: int) -> NoReturn:
    """os._exit in a job that goes on when a rank dies."""
    if status == 0 or runtime.in_forked_child():
        _os_exit(status)
    die(f"os._exit({status}) in process {os.getpid()}; this rank ends, and the others go on")


def abort(reason: str, cause: str = "") -> None:
    """Ends the whole job. Does nothing in a forked child, in a job of one rank, or while MPI is not running.

    Args:
        reason: For standard error.
        cause: For the last line of `mpicoll.run`; empty: the reason.
    """
    if runtime.in_forked_child():
        return
    from mpicoll._mpi import survivors
    from mpicoll._mpi.library import MPI

    world = runtime.current()
    if world is not None and world.parent is not None:
        world = world.parent  # MPI ends all ranks of the parent, and mpiexec names them by these numbers
    if world is None or world.size == 1 or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    last_words.why(cause or reason)
    rank = f"rank {world.rank} of {world.size} ({world.hostname})"
    if survivors.possible():
        die(f"{rank}: {reason}; this rank ends, and the others go on")
    _say(f"{rank}: {reason}; aborting the job")
    time.sleep(FORWARDING_S)
    # A thread of C, which needs no interpreter lock. It calls _exit(1).
    faulthandler.dump_traceback_later(ABORT_S, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115  open until the end
    MPI.COMM_WORLD.Abort(1)


def die(text: str) -> NoReturn:
    """Ends this process, so that the other ranks notice: Note [Only a killed rank is noticed]."""
    _say(text)
    while True:
        os.kill(os.getpid(), signal.SIGKILL)


def _say(text: str) -> None:
    print(f"mpicoll: {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
