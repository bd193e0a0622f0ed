"""The handle of an operation under way. It completes by itself, even if the program does not call wait."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import NoReturn

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _allow_inflight_collective_as_graph_input, _register_work
from torch.futures import Future

from mpicoll._base.group_errors import OperationTimeout
from mpicoll._mpi import runtime
from mpicoll._tensors import checks
from mpicoll._tensors.buffers import BY_ADDRESS


class WorkFuture(Future[list[Tensor]]):
    """The Future of a Work. Its ``wait`` waits for the Work, so that a callback may wait in the thread that runs operations."""

    def __init__(self, work: Work) -> None:
        # The devices of its value. Callbacks run after work launched on them before; torch refuses a value on another device.
        super().__init__(devices=sorted({t.device for t in work._tensors if t.device.type in BY_ADDRESS - {"cpu"}}, key=str))
        self._work = work

    def wait(self) -> list[Tensor]:
        self._work._settle()
        return super().wait()


class _Failure:
    """The value of a Future that has failed.

    Python's Futures have no errors in C++: DDP's reducer takes the first tensor in the value, and crashes if there is none. It
    finds tensors by pickling, which raises here.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise self.error


def _raise(value: _Failure) -> NoReturn:
    raise value.error


class Work(dist.Work):
    """One operation: pending, then completed with a result or with an exception.

    The thread that starts the operation makes it. The thread that runs the operation completes it, once. ``_mutex`` guards the
    step from pending to completed and the making of the Future. ``_finished`` is held until that step.

    Threads of C++ wait for its Future (DDP, torch.futures.wait_all), and nothing of ours runs there. So the watchdog calls
    `expire` at the limit.

    Attributes:
        begun: When the operation has begun, from which its limit counts; inf: it has not.
        awaited: Since when a thread waits, or may wait, because it has the Future; None: nobody has asked for the result.

    Args:
        on_timeout: Makes the group unusable.
        culprits: Says which ranks the operation waits for.
    """

    begun: float = math.inf
    awaited: float | None = None
    _waits_until = 0.0  # the end of the longest `wait`
    _done = False
    _error: Exception | None = None
    _future: Future[list[Tensor]] | None = None
    _completing: Callable[[], None] | None = None  # called on completion, before any thread can see it
    # Set by the queue or the poller: in it the waiting thread moves the operation forward, or waits for it.
    _help: Callable[[Work, float | None], None] | None = None
    _on_timeout: Callable[[OperationTimeout], None] | None = None
    _culprits: Callable[[], str] | None = None
    _finished: threading.Lock | None = None  # None: who waits does the work (`_help`)

    def __init__(
        self,
        where: str,
        tensors: list[Tensor],
        timeout_s: float,
        on_timeout: Callable[[OperationTimeout], None] | None = None,
        culprits: Callable[[], str] | None = None,
    ) -> None:
        super().__init__()
        self._where, self._tensors, self._timeout_s = where, tensors, timeout_s
        self._on_timeout, self._culprits = on_timeout, culprits
        self._mutex, self._finished = threading.Lock(), threading.Lock()
        self._finished.acquire()

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "completed"
        return f"<Work {self.where()}: {state}>"

    def where(self) -> str:
        """Returns the words by which errors name the operation."""
        return self._where

    def _named(self) -> str:
        culprits = self._culprits  # None once it has completed
        return "" if culprits is None else culprits()

    def limit(self, timeout: timedelta | None) -> None:
        """Gives the operation a time limit of its own. None, 0 and less (torch's unset): that of its group."""
        if timeout is not None and timeout > timedelta(0):
            self._timeout_s = timeout.total_seconds()

    # -- called by the thread that runs the operation ------------------------------------------------------------------

    def _complete(self, error: Exception | None = None) -> bool:
        """Completes the operation. Callbacks of its Future run in the calling thread. False: it has completed already."""
        with self._mutex:
            if self._done:
                return False
            if self._completing is not None:
                self._completing()
            self._error = error
            self._done = True
            future = self._future
        if self._finished is not None:
            self._finished.release()
        self._help = self._on_timeout = self._culprits = None
        if future is not None:
            self._resolve(future)
        return True

    def _on_completion(self, action: Callable[[], None]) -> None:
        """Calls ``action`` on completion, before any thread can see it; at once if the operation has completed."""
        with self._mutex:
            if not self._done:
                self._completing = action
                return
        action()

    def _resolve(self, future: Future[list[Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        elif any(tensor.device.type != "cpu" for tensor in self._tensors):
            future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            future._set_unwrap_func(_raise)
            future.set_result(_Failure(self._error))  # type: ignore[arg-type]

    # -- the user's side -----------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Blocks until the operation has completed. Returns True on every call.

        Args:
            timeout: A timedelta, or seconds; None or 0: the group's timeout.

        Raises:
            ValueError: The timeout is negative.
            OperationTimeout: The operation did not end in time. MPI cannot cancel a collective, so the group becomes unusable.
            Exception: The operation's own error, on every call.
        """
        self._settle(timeout)
        if self._error is not None:
            raise self._error
        return True

    def _settle(self, timeout: timedelta | float | None = None) -> None:
        """Blocks until the operation has completed or failed. Completes it with OperationTimeout if it takes too long."""
        if self._done:
            return
        _refuse_in_forked_child()
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        checks.timeout("wait", seconds or 0)
        seconds = seconds or self._timeout_s
        now = monotonic()
        self.awaited, self._waits_until = self.awaited or now, max(self._waits_until, now + seconds)
        if help_ := self._help:
            help_(self, seconds)
        else:
            self._rest(seconds)
        self.expire(seconds)

    def _rest(self, seconds: float) -> None:
        """Sleeps until the operation has ended, or for so many seconds."""
        if self._finished is not None and self._finished.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            self._finished.release()

    def overdue(self, now: float) -> bool:
        """True once the limit has passed: of the group, from the moment it has begun, or of a `wait` that ends later."""
        return now > max(self.begun + self._timeout_s, self._waits_until)

    def expire(self, limit_s: float | None = None, reason: str = "") -> None:
        """Completes the operation with OperationTimeout, and makes the group unusable. Does nothing if it has ended.

        Args:
            limit_s: The limit that has passed; None: that of the group.
            reason: Why it fails; empty: the limit has passed.
        """
        on_timeout = self._on_timeout  # None once it has completed
        if not self._done:
            if not reason:
                reason = f"Timed out: no end within the timeout of {limit_s or self._timeout_s:g} s. {self._named()}".rstrip(". ")
            error = OperationTimeout(f"{self.where()}: {reason}")
            if self._complete(error) and on_timeout is not None:  # otherwise the operation has ended meanwhile
                on_timeout(error)

    def is_completed(self) -> bool:
        """True once the operation has completed or failed. Each call moves the operation forward."""
        if not self._done and (help_ := self._help):
            _refuse_in_forked_child()
            help_(self, None)
        return self._done

    def is_success(self) -> bool:
        """True if the operation has completed without an error. Never raises."""
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        """Returns the operation's error; None while it is pending, or if it succeeded."""
        return self._error

    def result(self) -> list[Tensor]:
        """Waits for the operation and returns the tensors that it wrote."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Returns the sender's group rank for a completed receive, otherwise -1."""
        return -1

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a Future of the list of tensors. Its callbacks run in the thread that completes the operation."""
        with self._mutex:
            self.awaited = self.awaited or monotonic()
            resolved = self._done and self._future is None
            future = self._future = self._future or WorkFuture(self)
        if resolved:
            self._resolve(future)
        return future

    get_future_result = get_future


def found_by_tensors(work: Work) -> Work:
    """Returns ``work``, registered so that torch's wait_tensor finds it by its tensors, if the program asks for that.

    Inside torch's allow_inflight_collective_as_graph_input_ctx() a compiled function waits for operations started before it.
    """
    if _allow_inflight_collective_as_graph_input():
        for tensor in work._tensors:
            _register_work(tensor, work)
    return work


def _refuse_in_forked_child() -> None:
    """Raises in a forked child: operations under way at the fork belong to the parent."""
    if runtime.in_forked_child():
        raise runtime.forked_error()
