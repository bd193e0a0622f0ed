"""Runs the collectives of one group, one at a time, in the order in which they were started.

MPI makes no progress by itself: an Iallreduce that is left alone for a second still has all its work to do at Wait. So
asynchronous collectives run as blocking calls in a thread of the queue (made on first use), which sleeps inside MPI. Synchronous
collectives run in the caller's thread if the group is idle. Each group has its own queue, so that opposite orders on two groups
do not deadlock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from mpicoll._engine import torch_threads
from mpicoll._engine.line import Line
from mpicoll._engine.work import Work
from mpicoll._mpi import runtime
from mpicoll._tensors import signatures

# Note [Which thread runs what]
# A callback of a Future runs in the thread that completes the operation: the thread of a queue or of the poller, or the caller's
# thread if the operation was complete already. A callback may start operations (they are queued). It may even wait: a wait in the
# thread of a queue runs that queue up to the operation in question, and a wait in the poller's thread polls.

# Note [What a callback starts comes first]
# Every rank must carry out a group's collectives in one order. Let the program start A, add a callback to A that starts C, and
# then start B. On a fast rank A has ended when the callback is added, so that C starts at once: A C B. A slow rank has A and B in
# its queue when the callback runs. So an operation that a callback starts on its own group goes before the operations that the
# program has queued. And an operation of the program counts as pending until its callbacks have returned.


class CollectiveQueue:
    """Runs one group's collectives in FIFO order.

    ``_guard`` guards ``_queue`` and ``line.pending``.
    """

    def __init__(self, name: str, line: Line | None = None) -> None:
        self.name = name
        self.line = line or Line()
        self._waiting = 0  # pending operations that have not begun
        self._queue: deque[tuple[Callable[[], None], Work]] = deque()
        self._first: deque[tuple[Callable[[], None], Work]] = deque()  # see Note [What a callback starts comes first]
        self._guard = threading.Lock()
        self._wake = threading.Condition(self._guard)
        self.work: Work | None = None  # of the operation that the queue's thread is in
        self._closing = False
        self._thread: threading.Thread | None = None
        self.thread_id = 0  # of ``_thread``, once it runs

    def run(self, operation: Callable[[], None]) -> bool:
        """Runs an operation in this thread if the group is idle. Otherwise does nothing and returns False."""
        if self.line.pending or not self.line.running.acquire(blocking=False):
            return False
        try:
            self.line.started += 1
            operation()
        finally:
            self.line.running.release()
        return True

    def start(self, operation: Callable[[], None], work: Work) -> Work:
        """Queues an operation. Its Work completes when it has run."""
        work._help = self._help
        with self._guard:
            self.line.pending += 1
            self._waiting += 1
            queue = self._first if threading.get_ident() == self.thread_id else self._queue
            queue.append((operation, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"mpicoll queue {self.name}", daemon=True)
                self._thread.start()
            self._wake.notify()
        return work

    def _loop(self) -> None:
        self.thread_id = threading.get_ident()
        torch_threads.compute_with_one_thread()
        while True:
            with self._guard:
                while not self._first and not self._queue and not self._closing:
                    self._wake.wait()
                item = self._next()
            if item is None:
                return
            self._carry_out(*item)

    def _take(self) -> tuple[Callable[[], None], Work] | None:
        with self._guard:
            return self._next()

    def _next(self) -> tuple[Callable[[], None], Work] | None:
        queue = self._first or self._queue
        return queue.popleft() if queue else None

    def _carry_out(self, operation: Callable[[], None], work: Work) -> None:
        error: Exception | None = None
        self.work, work.begun = work, monotonic()
        runtime.entering()
        with self.line.running:
            with self._guard:
                self._waiting -= 1
                self.line.started += 1
            try:
                operation()
            except Exception as caught:  # noqa: BLE001  raised by the Work's wait, not in this thread
                error = caught
        work._complete(error)
        with self._guard:
            self.line.pending -= 1
            self.work = None

    def _help(self, work: Work, seconds: float | None) -> None:
        if threading.get_ident() == self.thread_id:
            while not work._done and (item := self._take()):  # see Note [Which thread runs what]
                self._carry_out(*item)
        elif seconds is not None:
            work._rest(seconds)

    def works(self) -> list[Work]:
        """The operation under way and those that wait behind it, in their order."""
        with self._guard:
            return [work for work in (self.work, *(each[1] for each in (*self._first, *self._queue))) if work is not None]

    def runs_here(self) -> bool:
        """True if the calling thread is the thread of this queue."""
        return threading.get_ident() == self.thread_id

    def current(self) -> int:
        """Returns a number of the collective under way, which is equal on all ranks if their calls are equal; 0: none so far."""
        if not self.line.history:
            return 0
        _, operation, _, signature, _ = self.line.history[-1]
        return signatures.alike(operation, signature)[0]

    def issued(self) -> int:
        """Number of operations that the program has started on this group: equal on all ranks at the same call."""
        with self._guard:
            return self.line.started + self._waiting

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after the queued operations. Returns False if that takes longer than ``timeout_s``.

        A later operation starts another thread.
        """
        if self._thread is None or threading.get_ident() == self.thread_id:
            return True
        with self._guard:
            self._closing = True
            self._wake.notify()
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            return False
        self._thread, self._closing = None, False
        return True

    def idle(self) -> bool:
        """True if the thread has ended, or was never started."""
        return self._thread is None or not self._thread.is_alive()
