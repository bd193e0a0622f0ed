"""The one place that runs the operations of a group: in their order, watched, with errors, events and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from time import monotonic
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd import profiler

from mpicoll._mpi.channel import Channel
from mpicoll._mpi.errors import MPIException, translate
from mpicoll._progress import spans
from mpicoll._progress.group_state import EVERYBODY, GroupState
from mpicoll._progress.queue import CollectiveQueue
from mpicoll._progress.watchdog import inside, watchdog
from mpicoll._progress.work import Work, found_by_tensors
from mpicoll._tensors.calls import Call
from mpicoll.errors import ConcurrentCollectives, GroupDestroyed, TruncationError

T = TypeVar("T")


class Group(GroupState):
    """A group that runs operations."""

    def __init__(
        self, name: str, channel: Channel, global_ranks: tuple[int, ...], timeout_s: float, queue: CollectiveQueue
    ) -> None:
        super().__init__(name, channel, global_ranks, timeout_s, queue)
        self._waiting_guard = Lock()  # guards _waiting_calls
        self._waiting_calls: dict[int, str] = {}  # by thread: the blocking collective that waits for its turn
        watchdog.watch(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """For operations that start from now on."""
        self.timeout_s = timeout_s
        watchdog.watch(timeout_s)

    def run(
        self,
        operation: str,
        call: Call,
        tensors: list[Tensor],
        async_op: bool = False,
        reads: Sequence[Tensor] | None = None,
    ) -> Work | None:
        """Runs a collective in its turn: now and in this thread if the group is idle, otherwise behind what is queued.

        Args:
            call: The MPI calls, and the copies into ``tensors``.
            tensors: What the operation writes.
            async_op: Run it in the queue's thread and return its Work.
            reads: Memory that it reads, held until it has ended, and shown to the profiler; None: ``tensors``.

        Raises:
            MpicollError: MPI's error, after which the group is unusable.
        """
        queue = self.queue
        if async_op or self.broken is not None or queue.pending or profiler._is_profiler_enabled:
            return self._run_in_turn(operation, call, tensors, async_op, tensors if reads is None else reads)
        if not queue.running.acquire(False):
            return self._run_in_turn(operation, call, tensors, async_op, tensors if reads is None else reads)
        queue.started += 1
        thread = get_ident()
        inside[thread] = (operation, self, monotonic(), EVERYBODY)
        try:
            function, arguments = call
            function(*arguments)
        except MPIException as raw:
            error = translate(raw, self.where(operation))
            self.fail(error)
            raise error from raw
        finally:
            del inside[thread]
            queue.running.release()
        return None

    def _run_in_turn(
        self, operation: str, call: Call, tensors: list[Tensor], async_op: bool, reads: Sequence[Tensor]
    ) -> Work | None:
        self.check_usable(operation)
        step = partial(self._step, operation, call, reads)
        span = self._span(operation, reads) if spans.on() else None

        def begin() -> Work:
            return self.queue.start(step, self._work(operation, tensors))

        if async_op:
            return found_by_tensors(begin() if span is None else spans.asynchronous(span, begin))
        try:
            self.queue.run(step, lambda: self._work(operation, tensors), lambda: self._waiting(operation))
        finally:
            if span is not None:
                span.end()
        return None

    def _step(self, operation: str, call: Call, reads: Sequence[Tensor]) -> None:
        """Args: reads: held here until the operation has ended."""
        self.check_usable(operation)  # the operation before may have failed since this one was queued
        self.guarded(operation, *call)

    def guarded(
        self, operation: str, function: Callable[..., T], arguments: Sequence[Any] = (), peer: int | None = EVERYBODY
    ) -> T:
        """Calls ``function(*arguments)`` in this thread: watched, and with MPI's errors turned into ours.

        Args:
            peer: The group rank that it waits for; EVERYBODY: a collective; None: a receive from any rank.
        """
        thread = get_ident()
        inside[thread] = (operation, self, monotonic(), peer)
        try:
            return function(*arguments)
        except MPIException as raw:
            error = translate(raw, self.where(operation))
            if peer == EVERYBODY or not isinstance(error, TruncationError):
                self.fail(error)
            raise error from raw
        finally:
            del inside[thread]

    def _work(self, operation: str, tensors: list[Tensor]) -> Work:
        """The handle of an operation that is about to start."""
        work = Work(self.where(operation), tensors, self.timeout_s)
        work._on_timeout = self.fail
        return work

    @contextmanager
    def _waiting(self, operation: str) -> Iterator[None]:
        """While a blocking collective of this thread waits for its turn: it is the only one, except in callbacks.

        Two threads that are in blocking collectives of one group at once may have their turns in another order on another rank,
        where data of different operations would then meet. Threads that take a lock for each call never meet here.

        Raises: ConcurrentCollectives: another thread is in a blocking collective of this group.
        """
        thread = get_ident()
        if thread == self.queue.thread_id:  # a callback, which has a place in the order
            yield
            return
        with self._waiting_guard:
            others = [other for number, other in self._waiting_calls.items() if number != thread]
            others += [
                entry[0]
                for number, entry in list(inside.items())
                if entry[1] is self and entry[3] == EVERYBODY and number not in (thread, self.queue.thread_id)
            ]
            if others:
                raise ConcurrentCollectives(
                    f"{self.where(operation)}: another thread of this rank is in {others[0]} on the same group. On another rank "
                    "the two may have another order, and data of different operations would meet. Give one of the threads a "
                    "group of its own: new_group(), called by all ranks"
                )
            self._waiting_calls[thread] = operation
        try:
            yield
        finally:
            with self._waiting_guard:
                del self._waiting_calls[thread]

    def _span(self, operation: str, inputs: Sequence[Tensor]) -> spans.Span:
        if operation == "all_reduce" and inputs[0].is_sparse:
            operation = "sparse_all_reduce"
        return spans.Span(operation, self, inputs, self.queue.issued() + 1)

    def end(self, timeout_s: float) -> bool:
        """Ends the queue after what is queued and refuses further use; False if something is stuck in it."""
        if not isinstance(self.broken, GroupDestroyed):
            failed = self.broken is not None
            ended = self.queue.close(0.1 if failed else timeout_s)
            self.broken = GroupDestroyed("the group has been destroyed")
            return ended and not failed
        return False
