"""Who looks for messages, and who runs what they ask for.

the serving thread   looks while nobody else does, less often the longer nothing comes; runs calls itself, since handing
                     one over would cost more than a small call takes
a caller that waits  looks for its answer itself, and hands calls over to the pool; the serving thread rests meanwhile
the deputy           sees when a call keeps the serving thread for more than a moment, and has another thread serve
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpicoll.rpc.futures import CallFuture
from mpicoll.rpc.pool import Pool

MOMENT_S = 0.5e-3  # seconds that a call may keep the serving thread
CROWDED_MOMENT_S = 20e-3  # seconds; the same when more calls are under way than threads are kept
SPIN_S, YIELD_S, LONG_S = 200e-6, 500e-6, 1.0  # seconds without a message: spin so long, then yield, then nap
NAP_SHARE = 0.1  # a nap is this part of the time that has been waited: a message waits for who looks no longer than that
NAPS_S = (50e-6, 1e-3)  # seconds; the shortest nap, and the longest
LONG_NAP_S = 20e-3  # when nothing has come for LONG_S: 50 looks a second, about 1 % of a core
STAND_BY_LOOKS = 100  # the deputy's, after the last call; then it sleeps until there is one


@dataclass
class Job:
    """Something to be done about a message. ``quick``: nothing but that a future completes that runs nobody's callbacks."""

    run: Callable[[], None]
    quick: bool


class Service:
    """Started by `start`, ended by `stop`.

    Args:   look: looks for messages once; called by one thread at a time. busy: whether a message is moving, so that nobody
            who looks should sleep. crowded: whether calls should rather wait for each other than get threads.
    """

    def __init__(self, look: Callable[[], list[Job]], busy: Callable[[], bool], pool: Pool, crowded: Callable[[], bool]) -> None:
        self._look, self._busy, self._pool, self._crowded = look, busy, pool, crowded
        self.looking = threading.Lock()  # held by the thread that looks
        self.stopping = False
        self._guard = threading.Lock()  # guards _waiting
        self._waiting = 0  # callers that look
        self._server: int | None = None  # the serving thread
        self._busy_since: float | None = None  # when it began the call that it runs
        self._wake = threading.Event()  # the deputy's

    def start(self) -> None:
        self._pool.submit(self._serve)
        threading.Thread(target=self._stand_by, name="mpicoll rpc deputy", daemon=True).start()

    def stop(self) -> None:
        """Nobody looks any more when this returns."""
        self.stopping = True
        self._wake.set()
        self.looking.acquire()

    def _jobs(self) -> list[Job]:
        if not self.looking.acquire(blocking=False):
            time.sleep(NAPS_S[0])  # another thread looks
            return []
        try:
            return self._look()
        finally:
            self.looking.release()

    def _serve(self) -> None:
        me = self._server = threading.get_ident()
        since = time.monotonic()
        while self._server == me and not self.stopping:
            jobs = [] if self._waiting else self._jobs()
            for job in jobs[:-1]:  # they may wait for each other
                self._pool.submit(job.run)
            if jobs:
                self._busy_since = time.monotonic()
                if not self._wake.is_set():
                    self._wake.set()
                jobs[-1].run()
                if self._server == me:  # else the deputy has found another
                    self._busy_since = None
                since = time.monotonic()
            elif self._waiting:
                time.sleep(NAPS_S[1])
            else:
                self._pause(time.monotonic() - since)

    def _stand_by(self) -> None:
        quiet = 0
        while not self.stopping:
            if quiet > STAND_BY_LOOKS:
                self._wake.clear()
                if self._busy_since is None and not self._wake.wait(1.0):
                    continue
                quiet = 0
            time.sleep(MOMENT_S)
            since = self._busy_since
            if since is None:
                quiet += 1
            elif time.monotonic() - since > (CROWDED_MOMENT_S if self._crowded() else MOMENT_S):
                self._busy_since = self._server = None
                self._pool.submit(self._serve)
                quiet = 0

    def help(self, future: CallFuture) -> None:
        """Looks until this future has ended, or the service."""
        since = time.monotonic()
        with self._guard:
            self._waiting += 1
        try:
            while not future.ended and not self.stopping:
                jobs = self._jobs()
                for job in jobs:
                    if job.quick:
                        job.run()
                    else:
                        self._pool.submit(job.run)
                        time.sleep(0)  # it needs the interpreter's lock, too
                if jobs:
                    since = time.monotonic()
                elif not future.ended:
                    self._pause(time.monotonic() - since)
        finally:
            with self._guard:
                self._waiting -= 1

    def _pause(self, waited_s: float) -> None:
        """After so many seconds without a message."""
        if waited_s < SPIN_S:
            return
        if self._busy() or waited_s < YIELD_S:
            os.sched_yield()
        else:
            time.sleep(LONG_NAP_S if waited_s > LONG_S else min(max(NAPS_S[0], NAP_SHARE * waited_s), NAPS_S[1]))
