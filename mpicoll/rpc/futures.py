"""The future of a call: a torch.futures.Future whose ``wait`` looks for the answer itself; and what collects several."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future


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
