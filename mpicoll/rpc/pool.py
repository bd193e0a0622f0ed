"""Threads that run the calls of other workers: as many as are needed. Up to a number, idle ones are kept for the next call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Pool:
    """Runs functions in threads.

    The thread that has become idle last is used first. Its memory (malloc gives each thread an arena) and its caches are warm:
    with the thread that has been idle longest, a pipeline of large gradients spent half its time on first touches of memory.
    """

    def __init__(self, kept: int) -> None:
        self.kept = kept  # number of idle threads to keep; further ones end
        self.threads = 0
        self._idle: list[SimpleQueue[Callable[[], object] | None]] = []  # what each idle thread is to run; None: it ends
        self._guard = threading.Lock()  # guards all of the above
        self._closing = False

    def submit(self, run: Callable[[], object]) -> None:
        """Runs ``run`` at once. There is no queue, because a function may wait for one that is submitted later."""
        with self._guard:
            if self._idle:
                self._idle.pop().put(run)
                return
            self.threads += 1
        next_run: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        next_run.put(run)  # not an argument: a Thread keeps those until it ends
        threading.Thread(target=self._loop, args=(next_run,), name="mpicoll rpc", daemon=True).start()

    def _loop(self, next_run: SimpleQueue[Callable[[], object] | None]) -> None:
        while (run := next_run.get()) is not None:
            run()
            del run  # frees what it refers to before this thread waits
            with self._guard:
                if self._closing or len(self._idle) >= self.kept:
                    break
                self._idle.append(next_run)
        with self._guard:
            self.threads -= 1

    def idle(self) -> int:
        with self._guard:
            return len(self._idle)

    def close(self) -> None:
        """Ends the idle threads at once, and each other thread after what it runs."""
        with self._guard:
            self._closing = True
            while self._idle:
                self._idle.pop().put(None)
