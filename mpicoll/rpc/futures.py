"""Futures of calls, whose ``wait`` looks for the answer itself; those that have not been answered; what collects several."""

from __future__ import annotations

import copy
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from mpicoll._base.errors import MpicollError, WorkerLeft
from mpicoll.rpc.workers import WorkerInfo, Workers


class CallTimedOut(RuntimeError):
    """A call has exceeded its time limit."""


class CallFuture(Future[Any]):
    """``settle`` and ``fail`` complete it, once; what comes later is dropped (an answer after the time limit).

    ``watched``: a program's callbacks will run when it ends. ``keeps``: whatever must not go before it has ended. ``parts``: the
    calls that it waits for, if it is what collects them.
    """

    def __init__(self, help_: Callable[[CallFuture], None]) -> None:
        super().__init__()
        self.ended = self.watched = False
        self.keeps: Any = None
        self.parts: list[CallFuture] = []
        self.error: BaseException | None = None
        self._help = help_
        self._once = threading.Lock()

    def wait(self) -> Any:
        if not self.ended:
            self._help(self)
        if self.error is not None:
            raise _fresh(self.error)
        return super().wait()

    def then(self, callback: Any) -> Any:
        self._watch()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        self._watch()
        super().add_done_callback(callback)

    def _watch(self) -> None:
        self.watched = True
        for part in self.parts:
            part._watch()

    def when_ended(self, callback: Callable[[Future[Any]], None]) -> None:
        """The same as add_done_callback, for callbacks that neither wait nor take a program's locks."""
        super().add_done_callback(callback)

    def settle(self, value: Any) -> None:
        if self._first():
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        if self._first():
            self.error = error
            self.set_exception(error)

    def _first(self) -> bool:
        with self._once:
            first, self.ended, self.keeps = not self.ended, True, None
        return first


# -- calls that have not been answered -------------------------------------------------------------------------------------


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


# -- what is made of futures -----------------------------------------------------------------------------------------------


def completed_future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def error_of(future: Future[Any]) -> Exception | None:
    """Returns the error of a future that has completed. None: it has a value."""
    try:
        future.value()
    except Exception as error:  # noqa: BLE001  it is the answer
        error.__traceback__ = None  # its frames hold the future that holds it
        return error
    return None


def map_future(future: Future[Any], function: Callable[[Any], Any]) -> Future[Any]:
    """A future of ``function`` of its value. Unlike ``then``, it lets an error keep its type."""
    answer: Future[Any] = Future()

    def ended(future: Future[Any]) -> None:
        try:
            answer.set_result(function(future.value()))
        except Exception as error:  # noqa: BLE001  it is the answer's
            error.__traceback__ = None  # see `error_of`
            answer.set_exception(error)

    future.add_done_callback(ended)
    return answer


def value_of(future: Future[Any]) -> Any:
    """What ``wait`` returns or raises, for a future that is kept: what it raises is a copy, see `_fresh`."""
    try:
        return future.wait()
    except Exception as error:  # noqa: BLE001  raised below
        fresh = _fresh(error)
        error.__traceback__ = None
    raise fresh


_collect_all = torch._C._collect_all


def install() -> None:
    """Has torch.futures.wait_all and collect_all end at the first error of a `CallFuture`, as they do for calls of torch's own.

    Python can end a future with a value only: an error is a value that is raised when it is taken, so that C++ would wait for
    all the others. Without a CallFuture among them, C++ still collects.
    """
    torch._C._collect_all = _collected


def _collected(futures: Sequence[torch._C.Future[Any]]) -> torch._C.Future[Any]:
    """A future of these futures; the first error among them is its error, at once."""
    futures = list(futures)
    calls = [future for future in futures if isinstance(future, CallFuture)]
    if not calls:
        return _collect_all(futures)
    whole = CallFuture(calls[0]._help)
    whole.parts = calls
    left = itertools.count(len(futures) - 1, -1)

    def ended(future: Future[Any]) -> None:
        if (error := error_of(future)) is not None:
            whole.fail(error)
        if next(left) == 0:
            whole.settle(futures)

    for future in futures:
        if isinstance(future, CallFuture):
            future.when_ended(ended)
        else:
            future.add_done_callback(ended)
    return whole


def _fresh(error: BaseException) -> BaseException:
    """A copy to raise. The future's own would collect tracebacks, whose frames hold the future: a circle through C++."""
    try:
        again = copy.copy(error)
    except Exception:  # noqa: BLE001  a constructor of the user's own
        return error
    return again if type(again) is type(error) else error
