"""Which thread receives messages, and which thread runs the calls that they carry.

serving thread    receives while no other thread does, less often the longer nothing comes. It runs a call itself, because
                  a hand-over would cost more than a small call takes.
waiting caller    receives its answer itself, and hands calls over to the pool. The serving thread rests meanwhile.
standby thread    notices when a call keeps the serving thread for more than a moment, and makes another thread serve.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from mpicoll._mpi.backoff import Backoff, Naps
from mpicoll.rpc.futures import CallFuture
from mpicoll.rpc.transport import Transport
from mpicoll.rpc.wire import IncomingMessage

MOMENT_S = 0.5e-3  # seconds that a call may keep the serving thread
CROWDED_MOMENT_S = 20e-3  # the same when more calls run than threads are kept
SPIN_S, YIELD_S = 200e-6, 500e-6  # without a message: spin until then, yield the core until then, then sleep
NAPS = Naps(50e-6, 30e-3, share=0.02)  # in the end 33 looks a second, about 1 % of a core; a rank of this node rings
OTHER_RECEIVES_S = 50e-6  # pause of a thread that finds another one receiving
REST_S = 1e-3  # seconds after which a resting serving thread looks whether a caller still receives
MOST_THREADS = 1000  # of a worker; a thread costs some 100 KB
MOST_NESTED = 20  # functions that a waiting thread runs one inside the other: a dozen frames each, of Python's 1000
STAND_BY_LOOKS = 100  # looks of the standby thread after the last call; then it sleeps until there is one


class Pool:
    """Runs functions in threads: as many as are needed. Up to ``kept`` idle ones are kept for the next function.

    A function may wait for one that is submitted later. So each has a thread of its own, and those that wait for answers
    (`waiting`) do not count: a chain of calls cannot block itself. While ``most`` others are busy, functions wait in a queue, and
    also if the system gives no more threads (a container has a limit). Threads that wait for answers then run them.

    The thread that has become idle last is used first. Its memory (malloc gives each thread an arena) and its caches are warm:
    with the thread that has been idle longest, a pipeline of large gradients spent half its time on first touches of memory.
    """

    def __init__(self, kept: int, most: int = MOST_THREADS) -> None:
        self.kept, self._most = kept, max(kept, most) + 1  # one receives
        self.threads = 0
        self._waiting = 0  # threads that wait for answers
        self._idle: list[SimpleQueue[Callable[[], object] | None]] = []  # what each idle thread is to run; None: it ends
        self._queue: deque[Callable[[], object]] = deque()  # empty while a thread is idle
        self._guard = threading.Lock()  # guards all of the above
        self._closing = False
        self._local = threading.local()  # ``depth``: how many functions a thread of the pool runs one inside the other

    def submit(self, run: Callable[[], object]) -> None:
        """Runs ``run``, at once if there is a thread for it. Raises RuntimeError if the system gives not even one thread."""
        with self._guard:
            if not self._idle and self.threads - self._waiting >= self._most:
                self._queue.append(run)
                return
        if not self.submit_now(run):
            with self._guard:
                if self._idle:
                    self._idle.pop().put(run)
                elif self.threads:
                    self._queue.append(run)
                else:
                    raise RuntimeError("mpicoll.rpc: the system starts no thread; look at its limit of processes (ulimit -u)")

    def submit_now(self, run: Callable[[], object]) -> bool:
        """Runs ``run`` at once, also past ``most`` threads. Returns False if the system gives no more."""
        with self._guard:
            if self._idle:
                self._idle.pop().put(run)
                return True
            self.threads += 1
        next_run: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        next_run.put(run)  # not an argument: a Thread keeps those until it ends
        try:
            threading.Thread(target=self._loop, args=(next_run,), name="mpicoll rpc", daemon=True).start()
        except RuntimeError:
            with self._guard:
                self.threads -= 1
            return False
        return True

    def _loop(self, next_run: SimpleQueue[Callable[[], object] | None]) -> None:
        self._local.depth = 1
        while (run := next_run.get()) is not None:
            run()
            del run  # frees what it refers to before this thread waits
            with self._guard:
                if self._queue:
                    next_run.put(self._queue.popleft())
                elif self._closing or len(self._idle) >= self.kept:
                    break
                else:
                    self._idle.append(next_run)
        with self._guard:
            self.threads -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the calling thread waits for answers, and another one may run the next function of the queue."""
        own = getattr(self._local, "depth", 0) == 1
        with self._guard:
            self._waiting += own
            run = self._queue.popleft() if own and self._queue else None
        if run is not None:
            self.submit(run)
        try:
            yield
        finally:
            with self._guard:
                self._waiting -= own

    def run_queued(self) -> bool:
        """Runs a function that the system gives no thread for, in the calling thread, which waits. False: there is none."""
        depth = getattr(self._local, "depth", 0)
        with self._guard:
            refused = self._queue and self.threads - self._waiting < self._most
            run = self._queue.pop() if refused and depth < MOST_NESTED else None
        if run is None:
            return False
        self._local.depth = max(depth, 1) + 1  # 1 is that of the pool's own threads, which `waiting` counts
        try:
            run()
        finally:
            self._local.depth = depth
        return True

    def is_full(self) -> bool:
        """True if the next function would wait in the queue."""
        with self._guard:
            return bool(self._queue) or (not self._idle and self.threads - self._waiting >= self._most)

    def idle(self) -> int:
        with self._guard:
            return len(self._idle)

    def close(self) -> None:
        """Ends the idle threads at once, and each other thread after what it runs."""
        with self._guard:
            self._closing = True
            while self._idle:
                self._idle.pop().put(None)


@dataclass
class Task:
    """What is to be done about a message."""

    run: Callable[[], None]
    is_quick: bool  # it only completes a future that has no callbacks of the program, so any thread may run it


@dataclass(eq=False)
class Turn:
    """The turn of one thread as the serving one. Only that thread changes it."""

    busy_since: float | None = None  # when the thread began the call that it runs


class Service:
    """Receives messages and runs what they ask for, from `start` to `stop`.

    Args:
        dispatch: Returns what is to be done about a message.
        maintain: Called before each look: expired calls, dead workers.
        is_crowded: Returns whether calls should rather wait for each other than get more threads.
    """

    def __init__(
        self,
        transport: Transport,
        pool: Pool,
        dispatch: Callable[[IncomingMessage], Task],
        maintain: Callable[[], None],
        is_crowded: Callable[[], bool],
    ) -> None:
        self._transport, self._pool = transport, pool
        self._dispatch, self._maintain, self._is_crowded = dispatch, maintain, is_crowded
        self._receiving = threading.Lock()  # held by the thread that receives
        self._stopping = False  # set once
        self._guard = threading.Lock()  # guards _waiting
        self._waiting = 0  # callers that receive
        self._turn = Turn()  # the newest one; each serving thread sets its own when it begins, and ends when it finds another
        self._wake = threading.Event()  # wakes the standby thread

    def start(self) -> None:
        self._pool.submit(self._serve)
        threading.Thread(target=self._stand_by, name="mpicoll rpc standby", daemon=True).start()

    def stop(self) -> None:
        """Ends both threads. No thread receives any more when this returns."""
        self._stopping = True
        self._wake.set()
        self._receiving.acquire()

    def _tasks(self) -> list[Task]:
        if not self._receiving.acquire(blocking=False):
            time.sleep(OTHER_RECEIVES_S)
            return []
        try:
            self._maintain()
            return [self._dispatch(message) for message in self._transport.arrived()]
        finally:
            self._receiving.release()

    def _serve(self) -> None:
        turn = self._turn = Turn()
        backoff = Backoff(spin_s=SPIN_S, yield_s=YIELD_S, naps=NAPS, moves=self._transport.moving, serves=True)
        while self._turn is turn and not self._stopping:
            tasks = [] if self._waiting else self._tasks()
            came = bool(tasks)
            here = tasks.pop() if came and not self._pool.is_full() else None  # full: nobody could serve in this thread's place
            for task in tasks:  # they may wait for each other
                self._pool.submit(task.run)
            if here is not None:
                turn.busy_since = time.monotonic()
                if not self._wake.is_set():
                    self._wake.set()
                here.run()
                turn.busy_since = None
            if came:
                backoff.reset()
            elif self._waiting:
                time.sleep(REST_S)
            else:
                backoff.pause()

    def _stand_by(self) -> None:
        quiet, replaced = 0, None
        while not self._stopping:
            if quiet > STAND_BY_LOOKS:
                self._wake.clear()
                if self._turn.busy_since is None and not self._wake.wait(1.0):
                    continue
                quiet = 0
            time.sleep(MOMENT_S)
            turn = self._turn
            since = turn.busy_since
            if since is None:
                quiet += 1
            elif turn is not replaced and time.monotonic() - since > (CROWDED_MOMENT_S if self._is_crowded() else MOMENT_S):
                if self._pool.submit_now(self._serve):  # otherwise again, in a moment
                    replaced = turn  # the next thread begins a turn of its own, and may be in a call at once
                quiet = 0

    def help(self, future: CallFuture) -> None:
        """Receives messages until this future has completed, or RPC has ended. Called by the thread that waits for it."""
        backoff = Backoff(spin_s=SPIN_S, yield_s=YIELD_S, naps=NAPS, moves=self._transport.moving, serves=True)
        with self._guard:
            self._waiting += 1
        try:
            with self._pool.waiting():
                while not future.ended and not self._stopping:
                    tasks = self._tasks()
                    for task in tasks:
                        if task.is_quick:
                            task.run()
                        else:
                            self._pool.submit(task.run)
                            time.sleep(0)  # lets that thread have the interpreter's lock
                    if tasks or (not future.ended and self._pool.run_queued()):
                        backoff.reset()
                    elif not future.ended:
                        backoff.pause()
        finally:
            with self._guard:
                self._waiting -= 1
