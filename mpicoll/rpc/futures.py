"""The future of a call: a torch.futures.Future whose ``wait`` receives the answer itself. And futures of several calls."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future


class CallTimedOut(RuntimeError):
    """A call has exceeded its timeout."""


class CallFuture(Future[Any]):
    """Completed once, by `settle` or `fail`. Later ones (an answer after the timeout) are dropped.

    Args:
        help_until_ended: Receives messages until the future has completed.

    Attributes:
        ended: It has completed, or is just about to.
        watched: Callbacks of the program run when it completes.
        keeps: An object that must live until it has completed.
        parts: The calls that it waits for, if it is the future of several.
    """

    def __init__(self, help_until_ended: Callable[[CallFuture], None]) -> None:
        super().__init__()
        self.ended = self.watched = False
        self.keeps: Any = None
        self.parts: list[CallFuture] = []
        self._error: BaseException | None = None
        self._help = help_until_ended
        self._once = threading.Lock()  # guards ended

    def wait(self) -> Any:
        if not self.ended:
            self._help(self)
        if self._error is not None:
            raise _fresh(self._error)
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
        """Like add_done_callback, for callbacks that neither wait nor take locks of the program."""
        super().add_done_callback(callback)

    def settle(self, value: Any) -> None:
        """Completes with a value."""
        if self._first():
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Completes with an error."""
        if self._first():
            self._error = error
            self.set_exception(error)

    def _first(self) -> bool:
        with self._once:
            first, self.ended, self.keeps = not self.ended, True, None
        return first


def has_timed_out(future: Future[Any] | None) -> bool:
    """Returns whether it is the future of a call that has exceeded its timeout."""
    return isinstance(future, CallFuture) and isinstance(future._error, CallTimedOut)


def completed_future(value: Any) -> Future[Any]:
    """Returns a future that has completed with this value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def map_future(future: Future[Any], function: Callable[[Any], Any]) -> Future[Any]:
    """Returns a future of ``function(value)``. Unlike with ``then``, an error keeps its type."""
    answer: Future[Any] = Future()

    def ended(future: Future[Any]) -> None:
        try:
            value = function(future.value())
        except Exception as error:  # noqa: BLE001  raised where the result is waited for
            error.__traceback__ = None  # its frames refer to the future that refers to it
            answer.set_exception(error)
        else:
            answer.set_result(value)

    future.add_done_callback(ended)
    return answer


def value_of(future: Future[Any]) -> Any:
    """Returns or raises what ``wait`` does, for a future that is kept: raises a copy, see `_fresh`."""
    try:
        return future.wait()
    except Exception as error:  # noqa: BLE001  raised below
        fresh = _fresh(error)
        error.__traceback__ = None
    raise fresh


_collect_all = torch._C._collect_all


def install() -> None:
    """Makes torch.futures.wait_all and collect_all end at the first error of a `CallFuture`, as with torch's own RPC.

    Python can complete a future only with a value: an error is a value that raises when it is read. C++ does not see it and
    would wait for all other futures. Without a CallFuture among them, torch's function still does the work.
    """
    torch._C._collect_all = _collected


def _collected(futures: Sequence[torch._C.Future[Any]]) -> torch._C.Future[Any]:
    """Returns a future of these futures. It fails at the first error among them."""
    futures = list(futures)
    calls = [future for future in futures if isinstance(future, CallFuture)]
    if not calls:
        return _collect_all(futures)
    whole = CallFuture(calls[0]._help)
    whole.parts = calls
    left = itertools.count(len(futures) - 1, -1)

    def ended(future: Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:  # noqa: BLE001  raised where the result is waited for
            error.__traceback__ = None  # its frames refer to the future that refers to it
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
    """Returns a copy to raise. The error itself would collect tracebacks, whose frames refer to the future: a C++ circle."""
    try:
        again = copy.copy(error)
    except Exception:  # noqa: BLE001  a constructor of the user
        return error
    return again if type(again) is type(error) else error
