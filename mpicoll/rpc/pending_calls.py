"""Calls of this worker that have not been answered: their futures, their deadlines, and the workers that will never answer."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mpicoll._base.errors import MpicollError, WorkerLeft
from mpicoll.rpc.futures import CallFuture, CallTimedOut
from mpicoll.rpc.workers import WorkerInfo, Workers

COMPLETED_KEPT = 1000  # deadlines of completed calls that stay in the heap until it is rebuilt


class PendingCall(NamedTuple):
    future: CallFuture
    worker: WorkerInfo
    function: str
    timeout_s: float  # 0: no limit


class PendingCalls:
    """The pending calls by number. Thread-safe.

    A call leaves by `take` (its answer is here), `expire`, `lose` (its worker has left) or `close` (RPC has ended). The last
    three fail its future.
    """

    def __init__(self, workers: Workers) -> None:
        self.closed: str | None = None  # why no further call is possible; None: RPC is running
        self._workers = workers
        self._guard = threading.Lock()  # guards all of this object, and workers.left
        self._calls: dict[int, PendingCall] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap; includes calls that have completed
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def check_open(self, worker: WorkerInfo) -> None:
        """Raises MpicollError if RPC has ended, and WorkerLeft if this worker has."""
        if self.closed:
            raise MpicollError(self.closed)
        if worker.id in self._workers.left:
            raise WorkerLeft(f"worker {worker.name!r} (rank {worker.id}) has left: {self._workers.left[worker.id]}")

    def add(self, call: PendingCall) -> int:
        """Adds a call and returns its number. Its timeout starts here. Raises what `check_open` raises."""
        with self._guard:
            self.check_open(call.worker)
            number = next(self._numbers)
            self._calls[number] = call
            if call.timeout_s > 0:
                self._add_deadline(time.monotonic() + call.timeout_s, number)
        return number

    def _add_deadline(self, deadline: float, number: int) -> None:
        if len(self._deadlines) > 2 * len(self._calls) + COMPLETED_KEPT:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._calls]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, number))

    def find(self, number: int) -> PendingCall | None:
        return self._calls.get(number)

    def take(self, number: int) -> PendingCall | None:
        """Removes and returns the call of this number. None: it has completed."""
        with self._guard:
            return self._calls.pop(number, None)

    def expire(self, submit: Callable[[Callable[[], None]], None]) -> None:
        """Fails the calls whose time is up, in other threads (a future's callbacks may take long). Cheap if there are none."""
        now = time.monotonic()
        deadlines = self._deadlines
        if not deadlines or deadlines[0][0] >= now:
            return
        with self._guard:
            late = []
            while self._deadlines and self._deadlines[0][0] < now:
                late.append(self._calls.pop(heapq.heappop(self._deadlines)[1], None))
        for call in late:
            if call is not None:
                text = (
                    f"RPC ran for more than set timeout ({call.timeout_s * 1000:.0f} ms) and will now be marked with an error: "
                    f"{call.function} on worker {call.worker.name!r} (rank {call.worker.id}): no answer within "
                    f"{call.timeout_s:g} s; {self._workers.process(call.worker.id)}"
                )
                submit(partial(call.future.fail, CallTimedOut(text)))

    def of_ended_processes(self) -> set[int]:
        """Returns the workers that have calls to answer, and whose processes are gone."""
        with self._guard:
            asked = {call.worker.id for call in self._calls.values()}
        return {rank for rank in asked if self._workers.has_ended(rank)}

    def lose(self, worker: WorkerInfo, reason: str) -> None:
        """Notes that a worker has left, and fails the calls to it."""
        with self._guard:
            self._workers.left.setdefault(worker.id, reason)
            numbers = [number for number, call in self._calls.items() if call.worker.id == worker.id]
            lost = [self._calls.pop(number) for number in numbers]
        for call in lost:
            text = f"worker {worker.name!r} (rank {worker.id}) has left before it answered {call.function}: {reason}"
            call.future.fail(WorkerLeft(text))

    def close(self, reason: str) -> None:
        """Fails all calls. Further ones raise an MpicollError with this reason."""
        with self._guard:
            self.closed = reason
            unanswered = list(self._calls.values())
            self._calls.clear()
        for call in unanswered:
            worker = f"worker {call.worker.name!r} (rank {call.worker.id})"
            call.future.fail(WorkerLeft(f"RPC was shut down before {worker} answered {call.function}"))


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of another callable."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
