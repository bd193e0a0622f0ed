"""Threads that run what other workers ask for: as many as are needed, kept for the next time up to a number."""

from __future__ import annotations

import threading
from collections.abc import Callable

Task = Callable[[], None]


class _IdleThread:
    """Where an idle thread waits. ``task``: what it is woken for; None: to end."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.called = threading.Semaphore(0)


class Pool:
    """``_guard``: guards all of the below. ``kept``: idle threads above this number end.

    The thread that has become idle last is taken first. Its memory (malloc gives each thread an arena) and caches are warm: with
    the one that has been idle longest, a pipeline of large gradients spent half its time on first touches of memory.
    """

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.threads = 0
        self._idle: list[_IdleThread] = []
        self._guard = threading.Lock()
        self._closing = False

    def submit(self, task: Task) -> None:
        """Runs ``task`` at once, in an idle thread or a new one: a task that waits for another must not keep it from running."""
        with self._guard:
            if self._idle:
                idle = self._idle.pop()
                idle.task = task
                idle.called.release()
                return
            self.threads += 1
        threading.Thread(target=self._loop, args=(task,), name="mpicoll rpc", daemon=True).start()

    def _loop(self, task: Task | None) -> None:
        idle = _IdleThread()
        while task is not None:
            task()
            del task  # what it held must not wait for the next
            with self._guard:
                if self._closing or len(self._idle) >= self.kept:
                    break
                self._idle.append(idle)
            idle.called.acquire()
            task, idle.task = idle.task, None
        with self._guard:
            self.threads -= 1

    def idle(self) -> int:
        """Threads that wait for a task."""
        with self._guard:
            return len(self._idle)

    def close(self) -> None:
        """Idle threads end; those at work end after it."""
        with self._guard:
            self._closing = True
            while self._idle:
                self._idle.pop().called.release()
