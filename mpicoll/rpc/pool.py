"""Threads that run what other workers ask for: as many as are needed, kept for the next time up to a number."""

from __future__ import annotations

import threading
from collections.abc import Callable

Job = Callable[[], None]


class _Seat:
    """Where an idle thread waits. ``job``: what it is woken for; None: to end."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.called = threading.Semaphore(0)


class Pool:
    """``_guard``: guards all of the below. ``kept``: idle threads above this number end.

    The thread that has become idle last is taken first. Its memory (malloc gives each thread an arena) and caches are warm: with
    the one that has been idle longest, a pipeline of large gradients spent half its time on first touches of memory.
    """

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.threads = 0
        self._idle: list[_Seat] = []
        self._guard = threading.Lock()
        self._closing = False

    def submit(self, job: Job) -> None:
        """Has ``job`` run at once, by an idle thread or a new one: a job that waits for another must not keep it from running."""
        with self._guard:
            if self._idle:
                seat = self._idle.pop()
                seat.job = job
                seat.called.release()
                return
            self.threads += 1
        threading.Thread(target=self._loop, args=(job,), name="mpicoll rpc", daemon=True).start()

    def _loop(self, job: Job | None) -> None:
        seat = _Seat()
        while job is not None:
            job()
            del job  # what it held must not wait for the next
            with self._guard:
                if self._closing or len(self._idle) >= self.kept:
                    break
                self._idle.append(seat)
            seat.called.acquire()
            job, seat.job = seat.job, None
        with self._guard:
            self.threads -= 1

    def idle(self) -> int:
        """Threads that wait for a job."""
        with self._guard:
            return len(self._idle)

    def close(self) -> None:
        """Idle threads end; those at work end after it."""
        with self._guard:
            self._closing = True
            while self._idle:
                self._idle.pop().called.release()
