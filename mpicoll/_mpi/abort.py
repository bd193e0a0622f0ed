"""An uncaught exception on one rank must not leave the others waiting: print it, flush, and abort the job.

Plain ``python`` under both Open MPI and MPICH hangs in that case: the failing rank sits in MPI_Finalize, the others in
the operation that it never reached.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mpicoll._mpi import runtime

FORWARDING_S = 0.3  # seconds for mpiexec to take what was printed: Hydra drops what is still in the pipe when the job is aborted

_before: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def install() -> None:
    """Chains our hooks in front of sys.excepthook and threading.excepthook; a second call does nothing."""
    global _before
    if _before is None:
        _before = (sys.excepthook, threading.excepthook)
        sys.excepthook = _excepthook
        threading.excepthook = _thread_excepthook


def uninstall() -> None:
    """Puts back what was there, unless somebody else has chained a hook onto ours in the meantime."""
    global _before
    if _before is not None and sys.excepthook is _excepthook and threading.excepthook is _thread_excepthook:
        sys.excepthook, threading.excepthook = _before
        _before = None


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    hook = _before[0] if _before else sys.__excepthook__
    try:
        hook(kind, error, trace)
    finally:
        abort(f"uncaught {kind.__name__}")


def _thread_excepthook(args: threading.ExceptHookArgs) -> None:
    hook = _before[1] if _before else threading.__excepthook__
    try:
        hook(args)
    finally:
        if args.exc_type is not SystemExit:
            abort(f"uncaught {args.exc_type.__name__} in thread {args.thread.name if args.thread else '?'}")


def abort(reason: str, status: int = 1) -> None:
    """Ends the whole job with ``status`` (at least in a job of several ranks), naming this rank and the reason."""
    if runtime.in_forked_child():
        return
    from mpicoll._mpi.library import MPI

    there = runtime.current()
    if there is not None and there.parent is not None:
        there = there.parent  # MPI ends all of its ranks, and by these numbers mpiexec names them
    if there is None or there.size == 1 or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    print(f"mpicoll: rank {there.rank} of {there.size} ({there.hostname}): {reason}; aborting the job", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(FORWARDING_S)
    MPI.COMM_WORLD.Abort(status)
