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

from mpicoll._base import frames, last_words, launcher
from mpicoll._base.waits import ABORT_S, FORWARDING_S
from mpicoll._mpi import runtime

_os_exit = os._exit


class Hooks:
    """Excepthooks that abort the job, in front of those of the program. The only instance is ``hooks``."""

    def __init__(self) -> None:
        self._next: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # what these call; None: not installed
        self._before: Callable[..., Any] = sys.excepthook  # what comes back

    def install(self, before: Callable[..., Any] | None = None) -> None:
        """Sets sys.excepthook and threading.excepthook. A second call does nothing.

        ``before``: the sys.excepthook that `uninstall` brings back; None: the one that is set now.
        """
        if self._next is None:
            self._next = (sys.excepthook, threading.excepthook)
            self._before = before or sys.excepthook
            sys.excepthook = self._uncaught
            threading.excepthook = self._uncaught_in_thread
            from mpicoll._mpi import survivors

            if survivors.possible():
                os._exit = _exit

    def uninstall(self) -> bool:
        """Brings the hooks before back, unless other code has set a hook since. Returns whether it did."""
        if self._next is None or sys.excepthook != self._uncaught or threading.excepthook != self._uncaught_in_thread:
            return False
        sys.excepthook, threading.excepthook = self._before, self._next[1]
        os._exit = _os_exit
        self._next = None
        return True

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook = self._next[0] if self._next else sys.__excepthook__
        try:
            frames.shorten(error)
            hook(kind, error, trace)
        finally:
            abort(f"uncaught {kind.__name__}", printed=True)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        hook = self._next[1] if self._next else threading.__excepthook__
        try:
            if args.exc_value is not None:
                frames.shorten(args.exc_value)
            hook(args)
        finally:
            if args.exc_type is not SystemExit:
                thread = args.thread.name if args.thread else "?"
                said = last_words.of_error(args.exc_value or args.exc_type())
                abort(f"uncaught {args.exc_type.__name__} in thread {thread}", *said, printed=True)


hooks = Hooks()
install, uninstall = hooks.install, hooks.uninstall


def _exit(status: int) -> NoReturn:
    """os._exit in a job that goes on when a rank dies."""
    if status == 0 or runtime.in_forked_child():
        _os_exit(status)
    die(f"os._exit({status}) in process {os.getpid()}; this rank ends, and the others go on")


def abort(reason: str, cause: str = "", culprit: tuple[int, bool] | None = None, printed: bool = False) -> None:
    """Ends the whole job. Does nothing in a forked child, in a job of one rank, or while MPI is not running.

    Args:
        reason: For standard error.
        cause: For the last line of `mpicoll.run`; empty: the reason.
        culprit: The rank of this world that ``cause`` is about, and whether its process has ended; None: this rank.
        printed: Standard error has a traceback; the last line of `mpicoll.run` says the rest.
    """
    if runtime.in_forked_child():
        return
    from mpicoll._mpi import survivors
    from mpicoll._mpi.library import MPI

    world = runtime.current()
    if world is None or not MPI.Is_initialized() or MPI.Is_finalized() or MPI.COMM_WORLD.Get_size() == 1:
        return
    last_words.why(cause or reason, culprit=culprit)
    rank = f"rank {world.rank} of {world.size} ({world.hostname})"
    if survivors.possible():
        die(f"{rank}: {reason}; this rank ends, and the others go on")
    if not printed or last_words.monitored() is None:
        _say(f"{rank}: {reason}; aborting the job")
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(FORWARDING_S)
    if launcher.store_world is not None:
        launcher.store_world.fail(cause or reason)
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
