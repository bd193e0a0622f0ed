"""Calls of this worker that have not been answered, their deadlines, and the workers that will never answer."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mpicoll._base.errors import MpicollError, WorkerLeft
from mpicoll.rpc.futures import CallFuture, CallTimedOut
from mpicoll.rpc.workers import WorkerInfo, Workers


class PendingCall(CallFuture):
    """The future of a call of ``function`` on ``worker``, which may take ``timeout_s`` from now on (0: no limit)."""

    def __init__(self, help_: Callable[[CallFuture], None], worker: WorkerInfo, function: str, timeout_s: float) -> None:
        super().__init__(help_)
        self.worker, self.function, self.timeout_s = worker, function, timeout_s
        self.deadline = time.monotonic() + timeout_s if timeout_s > 0 else math.inf


class PendingCalls:
    """The pending calls by number. Thread-safe.

    A call leaves by `take` (its answer is here), `expire`, `lose` (its worker has left) or `close` (RPC has ended). The last
    three fail it.
    """

    def __init__(self, workers: Workers) -> None:
        self.closed: str | None = None  # why no further call is possible; None: RPC is running
        self._workers = workers
        self.left: dict[int, str] = {}  # why, by rank, for the workers that have ended before the others
        self._guard = threading.Lock()  # guards all of this object
        self._calls: dict[int, PendingCall] = {}
        self._no_deadline_before = math.inf  # a look at the clock shows that none has passed; the calls may have ended since
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def check_open(self, worker: WorkerInfo) -> None:
        """Raises MpicollError if RPC has ended, and WorkerLeft if this worker has."""
        if self.closed:
            raise MpicollError(self.closed)
        if worker.id in self.left:
            raise WorkerLeft(f"worker {worker.name!r} (rank {worker.id}) has left: {self.left[worker.id]}")

    def add(self, call: PendingCall) -> int:
        """Adds a call and returns its number. Raises what `check_open` raises."""
        with self._guard:
            self.check_open(call.worker)
            number = next(self._numbers)
            self._calls[number] = call
            self._no_deadline_before = min(self._no_deadline_before, call.deadline)
        return number

    def find(self, number: int) -> PendingCall | None:
        return self._calls.get(number)

    def take(self, number: int) -> PendingCall | None:
        """Removes and returns the call of this number. None: it has completed."""
        with self._guard:
            return self._calls.pop(number, None)

    def _take_all(self, which: Callable[[PendingCall], bool]) -> list[PendingCall]:
        """Removes and returns the calls of which this is true. Called under the guard."""
        return [self._calls.pop(number) for number, call in list(self._calls.items()) if which(call)]

    def expire(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """Fails the calls whose time is up, in other threads (a future's callbacks may take long). Cheap if there are none."""
        now = time.monotonic()
        if now <= self._no_deadline_before:
            return
        with self._guard:
            late = self._take_all(lambda call: call.deadline < now)
            self._no_deadline_before = min((call.deadline for call in self._calls.values()), default=math.inf)
        for call in late:
            text = (
                f"RPC ran for more than set timeout ({call.timeout_s * 1000:.0f} ms) and will now be marked with an error: "
                f"{call.function} on worker {call.worker.name!r} (rank {call.worker.id}): no answer within "
                f"{call.timeout_s:g} s; {self._workers.process(call.worker.id)}"
            )
            submit(partial(call.fail, CallTimedOut(text)))

    def of_ended_processes(self) -> set[int]:
        """Returns the workers that have calls to answer, and whose processes are gone."""
        with self._guard:
            asked = {call.worker.id for call in self._calls.values()}
        return {rank for rank in asked if self._workers.has_ended(rank)}

    def lose(self, worker: WorkerInfo, reason: str) -> None:
        """Notes that a worker has left, and fails the calls to it."""
        with self._guard:
            self.left.setdefault(worker.id, reason)
            lost = self._take_all(lambda call: call.worker.id == worker.id)
        for call in lost:
            call.fail(
                WorkerLeft(f"worker {worker.name!r} (rank {worker.id}) has left before it answered {call.function}: {reason}")
            )

    def close(self, reason: str) -> None:
        """Fails all calls. Further ones raise an MpicollError with this reason."""
        with self._guard:
            self.closed = reason
            unanswered = self._take_all(lambda call: True)
        for call in unanswered:
            worker = f"worker {call.worker.name!r} (rank {call.worker.id})"
            call.fail(WorkerLeft(f"RPC was shut down before {worker} answered {call.function}"))


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of another callable."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
