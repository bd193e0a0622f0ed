"""Threads that run what other workers ask for: as many as are needed, kept for the next time up to a number."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Pool:
    """``_guard``: guards all of the below. ``kept``: idle threads above this number end."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.threads = 0
        self._idle = 0
        self._jobs: deque[Callable[[], None]] = deque()
        self._guard = threading.Lock()
        self._wake = threading.Condition(self._guard)
        self._closing = False

    def submit(self, job: Callable[[], None]) -> None:
        """Has ``job`` run at once, by an idle thread or a new one: a job that waits for another must not keep it from running."""
        with self._guard:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._wake.notify()
                return
            self.threads += 1
        threading.Thread(target=self._loop, name="mpicoll rpc", daemon=True).start()

    def _loop(self) -> None:
        while True:
            with self._guard:
                self._idle += 1
                while not self._jobs and not self._closing and self._idle <= self.kept:
                    self._wake.wait()
                self._idle -= 1
                if not self._jobs:
                    self.threads -= 1
                    return
                job = self._jobs.popleft()
            job()
            del job  # what it held must not wait for the next

    def close(self) -> None:
        """Idle threads end; those at work end after it."""
        with self._guard:
            self._closing = True
            self._wake.notify_all()
