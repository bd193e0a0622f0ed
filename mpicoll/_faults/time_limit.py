"""Ends the job when a call of MPI does not return in time, and no exception can be raised in it.

Ranks wait for each other in `mpicoll._faults.roll_call`, which raises at the limit. This module is for what that cannot limit:
the start of MPI, and the making of communicators once all ranks have come (one of them may be stopped in the middle).

Its thread calls nothing of MPI while it waits. The watchdog's thread, which calls MPI, cannot do this as well: at
MPI_THREAD_SERIALIZED it waits for the lock that a thread holds while it makes a communicator.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from mpicoll._base import last_words, launcher
from mpicoll._base.waits import AFTER_LIMIT_S, FORWARDING_S, LEAST_LIMIT_S
from mpicoll._mpi import abort
from mpicoll._mpi.claim import claim

LONGEST_S = 1e6  # threads cannot wait for much longer


class _Limit(NamedTuple):
    deadline: float
    operation: str
    limit_s: float


class Limits:
    """The limits of all threads, and the thread that ends the job at the first deadline. The only instance is ``limits``."""

    def __init__(self) -> None:
        self.of_threads: dict[int, _Limit] = {}  # a thread writes only its own entry
        self._changed = threading.Condition()  # guards the two variables below
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0

    def begin(self, caller: int, operation: str, limit_s: float) -> None:
        """Begins a limit. The thread sleeps on when the body has ended, so that the next limit costs 2 us, not 100."""
        deadline = time.monotonic() + max(limit_s, LEAST_LIMIT_S) + AFTER_LIMIT_S
        self.of_threads[caller] = _Limit(deadline, operation, limit_s)
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mpicoll time limit", daemon=True)
                self._thread.start()
            elif deadline < self._wakes_at:
                self._changed.notify()

    def stop(self) -> None:
        """Ends the thread, if no limit is under way. The next limit starts it again."""
        with self._changed:
            thread = self._thread
            self._changed.notify()
        if thread is not None and not self.of_threads:
            thread.join()

    def _loop(self) -> None:
        with self._changed:
            while limits := list(self.of_threads.values()):
                first = min(limits)
                remaining = first.deadline - time.monotonic()
                if remaining <= 0:
                    _end(first)
                self._wakes_at = first.deadline
                self._changed.wait(min(remaining, LONGEST_S))
            self._thread = None


limits = Limits()
os.register_at_fork(after_in_child=lambda: Limits.__init__(limits))  # the child does not have the thread


@contextlib.contextmanager
def end_job_after(operation: str, limit_s: float) -> Iterator[None]:
    """Ends the job if the body does not end within ``limit_s`` seconds. Within another limit of this thread it does nothing."""
    caller = threading.get_ident()
    if caller in limits.of_threads:
        yield
        return
    limits.begin(caller, operation, limit_s)
    try:
        yield
    finally:
        del limits.of_threads[caller]


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """The limit around the caller does not hold in the body, which ends by itself, and begins anew after it."""
    caller = threading.get_ident()
    limit = limits.of_threads.get(caller)
    if limit is None:
        yield
        return
    limits.of_threads[caller] = limit._replace(deadline=math.inf)
    try:
        yield
    finally:
        limits.begin(caller, limit.operation, limit.limit_s)


def _end(limit: _Limit) -> None:
    text = f"{limit.operation}: Timed out: no end within the timeout of {limit.limit_s:g} s"
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        abort.abort(f"{text}, although all of its ranks had come: one of them is stopped, or MPI hangs")
    absent = claim.absent()
    cause = f"rank {', '.join(map(str, absent))} has not started MPI" if absent else "not every rank has started MPI"
    launch = launcher.detect()
    said = f"has not started MPI. On rank {launch and launch.rank} {text}" if absent else f"{text}: {cause}"
    last_words.why(said, culprit=(absent[0], False) if absent else None)
    print(f"mpicoll: rank {launch and launch.rank}: {text}: {cause}; aborting the job", file=sys.stderr, flush=True)
    time.sleep(FORWARDING_S)
    os._exit(1)
