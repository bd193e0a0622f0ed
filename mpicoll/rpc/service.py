"""Who looks for messages, and who runs what they ask for.

the serving thread   looks while nobody else does, less often the longer nothing comes; runs calls itself, since handing
                     one over would cost more than a small call takes
a caller that waits  looks for its answer itself, and hands calls over to the pool; the serving thread rests meanwhile
the standby thread           sees when a call keeps the serving thread for more than a moment, and has another thread serve
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpicoll._mpi.backoff import Backoff, Naps
from mpicoll.rpc.futures import CallFuture
from mpicoll.rpc.pool import Pool

MOMENT_S = 0.5e-3  # seconds that a call may keep the serving thread
CROWDED_MOMENT_S = 20e-3  # seconds; the same when more calls are under way than threads are kept
SPIN_S, YIELD_S = 200e-6, 500e-6  # seconds without a message: spin until then, yield the core until then, then sleep
NAPS = Naps(50e-6, 1e-3, share=0.1, idle_after_s=1.0, idle_s=20e-3)  # idle: 50 looks a second, about 1 % of a core
REST_S = 1e-3  # seconds between two looks of the serving thread for whether a caller still receives in its place
STAND_BY_LOOKS = 100  # the standby thread's, after the last call; then it sleeps until there is one


@dataclass
class Task:
    """Something to be done about a message. ``is_quick``: nothing but that a future completes that runs nobody's callbacks."""

    run: Callable[[], None]
    is_quick: bool


class Service:
    """Started by `start`, ended by `stop`.

    Args:   look: looks for messages once; called by one thread at a time. busy: whether a message is moving, so that nobody
            who looks should sleep. crowded: whether calls should rather wait for each other than get threads.
    """

    def __init__(self, look: Callable[[], list[Task]], busy: Callable[[], bool], pool: Pool, crowded: Callable[[], bool]) -> None:
        self._look, self._busy, self._pool, self._crowded = look, busy, pool, crowded
        self.looking = threading.Lock()  # held by the thread that looks
        self.stopping = False
        self._guard = threading.Lock()  # guards _waiting
        self._waiting = 0  # callers that look
        self._server: int | None = None  # the serving thread
        self._busy_since: float | None = None  # when it began the call that it runs
        self._wake = threading.Event()  # the standby thread's

    def start(self) -> None:
        self._pool.submit(self._serve)
        threading.Thread(target=self._stand_by, name="mpicoll rpc standby", daemon=True).start()

    def stop(self) -> None:
        """Nobody looks any more when this returns."""
        self.stopping = True
        self._wake.set()
        self.looking.acquire()

    def _tasks(self) -> list[Task]:
        if not self.looking.acquire(blocking=False):
            time.sleep(NAPS.shortest_s)  # another thread looks
            return []
        try:
            return self._look()
        finally:
            self.looking.release()

    def _serve(self) -> None:
        me = self._server = threading.get_ident()
        backoff = _backoff()
        while self._server == me and not self.stopping:
            tasks = [] if self._waiting else self._tasks()
            for task in tasks[:-1]:  # they may wait for each other
                self._pool.submit(task.run)
            if tasks:
                self._busy_since = time.monotonic()
                if not self._wake.is_set():
                    self._wake.set()
                tasks[-1].run()
                if self._server == me:  # else the standby thread has found another
                    self._busy_since = None
                backoff.reset()
            elif self._waiting:
                time.sleep(REST_S)
            else:
                backoff.pause(self._busy())

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
        backoff = _backoff()
        with self._guard:
            self._waiting += 1
        try:
            while not future.ended and not self.stopping:
                tasks = self._tasks()
                for task in tasks:
                    if task.is_quick:
                        task.run()
                    else:
                        self._pool.submit(task.run)
                        time.sleep(0)  # it needs the interpreter's lock, too
                if tasks:
                    backoff.reset()
                elif not future.ended:
                    backoff.pause(self._busy())
        finally:
            with self._guard:
                self._waiting -= 1


def _backoff() -> Backoff:
    return Backoff(SPIN_S, YIELD_S, NAPS)
