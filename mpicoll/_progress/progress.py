"""Who carries operations out: a lane for a group's collectives, one poller for the process's point-to-point messages.

MPI makes no progress by itself: an Iallreduce left alone for a second has all its work left at Wait. So somebody must
drive what was started asynchronously, without stealing the core that computes.

    Lane     collectives of one group, one at a time, in the order in which they were started. Synchronous ones run in
             the caller's thread when nothing is before them; asynchronous ones as blocking calls in the lane's thread
             (made on first use), which sleeps inside MPI. Two groups have two lanes: opposite orders do not deadlock.
    Poller   sends and receives are posted to MPI at once, by the caller (MPI's own order holds), and completed by
             polling: by the poller's thread, which backs off, or by whoever waits.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from mpicoll._cuda import streams
from mpicoll._mpi.backoff import Backoff
from mpicoll._progress.work import Work

# Note [Which thread runs what]
# A callback of a Future runs in the thread that completes the operation: a lane's, the poller's, or the caller's if the
# operation was complete already. From there it may start operations (they are queued), and it may even wait: a wait in a
# lane's own thread runs that lane's queue up to the operation that is waited for, and a wait in the poller's thread polls.

# Note [What a callback starts comes first]
# Every rank must carry out a group's collectives in one order. Let the program start A, hang a callback on it that starts
# C, and then start B. A fast rank has A behind it when the callback is hung on, so that C starts there and then: A C B. A
# slow one has A and B in its queue when the callback runs. So what a callback starts on its own lane goes before what the
# program has queued, and the program's operations count as queued until the callbacks of the one before have returned.


class Lane:
    """Runs one group's collectives in FIFO order.

    ``turn``: held by the thread that is inside an operation. ``_guard``: guards ``_queue`` and ``queued``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = threading.Lock()
        self.begun = 0  # operations, synchronous ones too, that have had their turn: the same number on all ranks, in time
        self.queued = 0  # operations started asynchronously that have not ended, their callbacks included
        self._waiting = 0  # those of them that have not had their turn
        self._queue: deque[tuple[Callable[[], None], Work]] = deque()
        self._first: deque[tuple[Callable[[], None], Work]] = deque()  # see Note [What a callback starts comes first]
        self._guard = threading.Lock()
        self._wake = threading.Condition(self._guard)
        self._closing = False
        self._thread: threading.Thread | None = None
        self.thread_id = 0  # of ``_thread``, once it runs

    def run(
        self,
        operation: Callable[[], None],
        work: Callable[[], Work],
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Runs a synchronous operation: here, if nothing is before it, else in its turn.

        Args:
            work: Makes its handle, if it has to wait for its turn.
            waiting: Entered while it waits for its turn; may raise instead.
        """
        if self.queued or not self.turn.acquire(blocking=False):
            with waiting():
                self.start(operation, work()).wait()
            return
        self.begun += 1
        try:
            operation()
        finally:
            self.turn.release()

    def start(self, operation: Callable[[], None], work: Work) -> Work:
        """Queues an operation; its Work completes when it has run."""
        work._help = self._help
        with self._guard:
            self.queued += 1
            self._waiting += 1
            queue = self._first if threading.get_ident() == self.thread_id else self._queue
            queue.append((operation, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"mpicoll lane {self.name}", daemon=True)
                self._thread.start()
            self._wake.notify()
        return work

    def _loop(self) -> None:
        self.thread_id = threading.get_ident()
        while True:
            with self._guard:
                while not self._first and not self._queue and not self._closing:
                    self._wake.wait()
                item = self._next()
            if item is None:
                return
            self._carry_out(*item)

    def _next(self) -> tuple[Callable[[], None], Work] | None:
        queue = self._first or self._queue
        return queue.popleft() if queue else None

    def _carry_out(self, operation: Callable[[], None], work: Work) -> None:
        error: Exception | None = None
        streams.settle_in()
        with self.turn:
            with self._guard:
                self._waiting -= 1
                self.begun += 1
            try:
                operation()
            except Exception as caught:  # noqa: BLE001  it belongs to whoever waits, not to this thread
                error = caught
        work._complete(error)
        with self._guard:
            self.queued -= 1

    def _help(self, work: Work, seconds: float | None) -> None:
        if threading.get_ident() == self.thread_id:
            while not work._done and (item := self._next()):  # see Note [Which thread runs what]
                self._carry_out(*item)
        elif seconds is not None and work._finished.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            work._finished.release()

    def issued(self) -> int:
        """Number of operations that have been started on this lane: the same number on all ranks at the same call."""
        with self._guard:
            return self.begun + self._waiting

    def close(self, timeout_s: float) -> bool:
        """Ends the thread after what is queued; False if that took longer than ``timeout_s``."""
        with self._guard:
            self._closing = True
            self._wake.notify()
        if self._thread is None or threading.get_ident() == self.thread_id:
            return True
        self._thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def idle(self) -> bool:
        """True if no thread of ours is inside an operation of this group."""
        return self._thread is None or not self._thread.is_alive()


class Request(Protocol):
    """A posted message: ``test`` moves it forward and returns True when it has ended; it raises what went wrong."""

    def test(self) -> bool: ...


FIRST_NAP_S = 100e-6  # seconds before the poller looks for the first time: who waits at once polls, and meets nobody
LONGEST_NAP_S = 1e-3  # seconds; the longest that a finished message waits for the poller; 1000 looks a second: 1 % of a core
WARM_NAPS = 50  # the poller looks on for so long after the last message, since waking it costs as much as a small message


class Poller:
    """Completes posted messages. ``_guard`` guards ``_pending`` and is held while requests are tested, never in callbacks.

    ``_waiting``: an entry for each thread that waits for a message, and so polls all of them.
    """

    def __init__(self) -> None:
        self._pending: dict[Work, Request] = {}
        self._guard = threading.Lock()
        self._waiting: list[Work] = []
        self.moved = False  # set by a request that has not ended, but come further
        self._wake = threading.Event()
        self._asleep = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, work: Work, request: Request) -> Work:
        """Takes over a posted message; its Work completes when the message has arrived."""
        work._help = self._help
        with self._guard:
            self._pending[work] = request
            if self._thread is None:
                self._closing = False
                self._thread = threading.Thread(target=self._loop, name="mpicoll poller", daemon=True)
                self._thread.start()
        if self._asleep:
            self._wake.set()
        return work

    def poll(self) -> bool:
        """Tests every pending message once; True if one ended, or came further."""
        ended: list[tuple[Work, Exception | None]] = []
        with self._guard:
            for work, request in self._pending.items():
                try:
                    if request.test():
                        ended.append((work, None))
                except Exception as caught:  # noqa: BLE001  it belongs to whoever waits for this message
                    ended.append((work, caught))
            for work, _ in ended:
                del self._pending[work]
        for work, error in ended:
            work._complete(error)
        moved, self.moved = self.moved, False
        return bool(ended) or moved

    def _loop(self) -> None:
        nap, idle = FIRST_NAP_S, 0
        while not self._closing:
            if self._pending:
                time.sleep(nap)
                idle = 0
                if not self._waiting:
                    streams.settle_in()
                    nap = FIRST_NAP_S if self.poll() else min(nap * 2, LONGEST_NAP_S)
            elif idle < WARM_NAPS:
                time.sleep(LONGEST_NAP_S)
                nap, idle = FIRST_NAP_S, idle + 1
            else:
                self._sleep()

    def _sleep(self) -> None:
        self._wake.clear()
        self._asleep = True
        if not self._pending and not self._closing:  # whoever adds a message now sees that we are asleep
            self._wake.wait()
        self._asleep = False

    def _help(self, work: Work, seconds: float | None) -> None:
        self.poll()
        if seconds is None:
            return
        deadline = time.monotonic() + seconds
        backoff = Backoff()
        self._waiting.append(work)
        try:
            while not work._done and time.monotonic() < deadline:
                if self.poll():
                    backoff.reset()
                else:
                    backoff.pause()
        finally:
            self._waiting.remove(work)

    def drop(self, belongs: Callable[[Request], bool]) -> dict[Work, Request]:
        """Takes out the pending messages that belong to a group that is being closed, for it to cancel."""
        with self._guard:
            dropped = {work: request for work, request in self._pending.items() if belongs(request)}
            for work in dropped:
                del self._pending[work]
        return dropped

    def close(self) -> None:
        """Ends the thread; pending messages stay posted."""
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None


poller = Poller()
