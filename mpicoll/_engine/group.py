"""Runs the operations of a group in their order, with watchdog entries, translated errors, profiler events and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock, get_ident
from time import monotonic, sleep
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd import profiler

from mpicoll._base.errors import CollectiveMismatch, ConcurrentCollectives, MpicollError
from mpicoll._base.group_errors import GroupDestroyed, PeerLost, TruncationError
from mpicoll._engine import spans
from mpicoll._engine.line import Line
from mpicoll._engine.poller import poller
from mpicoll._engine.queue import CollectiveQueue
from mpicoll._engine.work import Work, found_by_tensors
from mpicoll._faults import culprits
from mpicoll._faults.group_state import GroupState
from mpicoll._faults.late_ranks import CALL_BITS
from mpicoll._faults.under_way import table
from mpicoll._faults.watchdog import watchdog
from mpicoll._mpi.errors import MPIException, translate
from mpicoll._tensors import checks, signatures, storages
from mpicoll._tensors.calls import Call, DifferentCalls, Signature
from mpicoll._tensors.storages import Held

T = TypeVar("T")
FAILURES = MPIException, DifferentCalls
inside = table.inside

# Note [A refusal is a call]
# A program may catch the ValueError of a wrong argument and go on. If the other ranks have made the call, they wait in it, and
# the next collective of this rank would meet them there, with the data of another operation. So a refused call takes its number,
# as any other call does. The watchdogs find within a second that the ranks differ at this number, name the error, and end the
# job; if all ranks have refused, nothing differs. Meanwhile the next collective of this rank waits until all ranks of the node
# have come to it, so that no byte moves. A barrier does not wait: it moves none.


class Group(GroupState):
    """A group that runs operations."""

    queue: CollectiveQueue
    line: Line

    def __post_init__(self) -> None:
        super().__post_init__()
        self._waiting_guard = Lock()  # guards _waiting_calls
        self._waiting_calls: dict[int, str] = {}  # the blocking collective that waits for its turn, by thread
        self.line.group, self.reconfigurable, self.now = self, self.raises, self._in_turn if self.raises else self.line.now
        self.line.show(self.attendance)
        table.groups[self], table.posted = None, poller.under_way
        watchdog.watch(self.timeout_s)

    def _in_turn(self, operation: str, call: Call, background: bool | None = None) -> bool:
        """`Line.now` for the queue's thread alone. A thread inside MPI cannot raise, so that of the program waits for a Work."""
        return background is not None and self.line.now(operation, call, background)

    def set_timeout(self, timeout_s: float) -> None:
        """Sets the timeout of operations that start from now on. Raises ValueError if it is negative."""
        checks.timeout("set_timeout", timeout_s)
        self.timeout_s = timeout_s
        watchdog.watch(timeout_s)

    def run(
        self, operation: str, call: Call, tensors: list[Tensor], async_op: bool = False, reads: Sequence[Tensor] | None = None
    ) -> Work | None:
        """Runs a collective in its turn: at once in this thread if the group is idle, otherwise after the queued operations.

        Args:
            call: The MPI calls, and the copies into ``tensors``.
            tensors: The tensors that the operation writes.
            async_op: Run it in the queue's thread and return its Work.
            reads: The memory that it reads, kept until it has ended and shown to the profiler; None: ``tensors``.

        Raises:
            MpicollError: MPI's error. The group is unusable afterwards.
        """
        if not async_op and self.now(operation, call):
            return None
        return self._run_in_turn(operation, call, tensors, async_op, tensors if reads is None else reads)

    def _run_in_turn(
        self, operation: str, call: Call, tensors: list[Tensor], async_op: bool, reads: Sequence[Tensor]
    ) -> Work | None:
        self.check_usable(operation)
        held: Held = {}
        if async_op:
            held = storages.hold([*tensors, *reads])
            call = storages.aliased(call, held)
        step = partial(self._step, operation, call, reads, held)
        span = self._span(operation, reads) if profiler._is_profiler_enabled else None

        def begin() -> Work:
            return self.queue.start(step, self._work(operation, tensors))

        if async_op:
            return found_by_tensors(begin() if span is None else spans.asynchronous(span, begin))
        try:
            if self.raises or not self.queue.run(step):
                with self._waiting(operation):
                    begin().wait()
        finally:
            if span is not None:
                span.end()
        return None

    def value(self, operation: str, function: Callable[..., T], *arguments: Any, reads: Sequence[Tensor] = ()) -> T:
        """Runs a collective that writes no tensor in its turn. Returns what ``function(*arguments)`` returns."""
        found: list[T] = []
        self.run(operation, (lambda: found.append(function(*arguments)), (), ()), [], reads=reads)
        return found[0]

    def _step(self, operation: str, call: Call, reads: Sequence[Tensor], held: Held) -> None:
        """Runs the call in the queue's order; the argument ``reads`` keeps the memory until the operation has ended."""
        self.check_usable(operation)  # an earlier operation may have failed since this one was queued
        if freed := storages.freed(held):
            lost = MpicollError(f"{self.where(operation)}: {freed}. This rank did not take part in it")
            self.fail(lost)
            raise lost
        self.now(operation, call, self.queue.runs_here())
        if resized := storages.resized(held):
            raise MpicollError(f"{self.where(operation)}: {resized}")

    def attend(self, operation: str, signature: Signature, number: int) -> None:
        """Waits for the members of this node. An exception leaves the collective before MPI has begun."""
        try:
            self.attendance.wait(operation, signature, number, self._still_waits)
        except FAILURES:  # a rank has died, or calls something else; nothing has begun
            raise
        except BaseException as raw:
            self._leave(operation, raw)
            raise
        if self.reconfigurable:
            self.check_usable(operation)

    def _still_waits(self) -> bool:
        """Moves messages forward. Returns True if the group has failed meanwhile."""
        self.channel.progress()
        return self.broken is not None

    def _leave(self, operation: str, raw: BaseException) -> None:
        self.left = self.line.started
        self.fail(MpicollError(f"{self.where(operation)}: {type(raw).__name__} has left it half done"))
        watchdog.write(self.ledger)

    def failure_of(self, operation: str, begun: Callable[..., Any] | None, raw: BaseException) -> BaseException:
        """Returns our error for what has ended a collective. The group is unusable from now on, if its ranks may be out of step.

        ``begun``: its algorithm; None: it had not begun.
        Errors of our own leave it as it is. So does a signal handler that raises if the algorithm is one call of MPI: Python runs
        handlers after it. Everything else has left the collective half done: a handler that raises, memory that is missing.
        """
        if isinstance(raw, MpicollError):
            return raw
        if not isinstance(raw, FAILURES):
            if begun is not None and not isinstance(getattr(begun, "__func__", begun), FunctionType):
                return raw
            self._leave(operation, raw)
            return raw
        if isinstance(raw, MPIException):
            error: Exception = translate(raw, self.where(operation))
            self.fail(error)
            if not isinstance(error, PeerLost) and (differ := watchdog.mismatch(self, self.line.started)):
                if isinstance(error, TruncationError):
                    return TruncationError(f"{self.where(operation)}: {differ}")
                return CollectiveMismatch(f"{error}. {differ[0].upper()}{differ[1:]}")
            return error
        what = f"{self.where(operation)}: {str(raw) or 'the calls of the ranks do not fit together'}"
        self.fail(CollectiveMismatch(what))
        differ = watchdog.mismatch(self, self.line.started)
        return CollectiveMismatch(f"{self.where(operation)}: {differ}" if differ else what)

    def guarded(self, operation: str, function: Callable[..., T], arguments: Sequence[Any], peer: int | None) -> T:
        """Calls ``function(*arguments)``, a message, in this thread under the watchdog.

        Args:
            peer: The group rank that it waits for; None: a receive from any rank.

        Raises:
            MpicollError: MPI's error. The group is unusable afterwards, except after a message that was too long.
        """
        entry = operation, self, monotonic(), peer
        inside[entry] = None
        try:
            return function(*arguments)
        except MPIException as raw:
            error = translate(raw, self.where(operation))
            if not isinstance(error, TruncationError):
                self.fail(error)
            raise error from raw
        finally:
            del inside[entry]

    def _work(self, operation: str, tensors: list[Tensor]) -> Work:
        """Returns the handle of an operation that is about to start."""
        return Work(self.where(operation), tensors, self.timeout_s, self.fail, partial(culprits.of_group, self))

    def refused(self, operation: str, error: Exception) -> None:
        """Gives a collective whose arguments this rank refuses its place in the order, see Note [A refusal is a call]."""
        known_to_all = isinstance(error, MpicollError)  # all ranks raise it, from inside the collective
        if known_to_all or self.broken is not None or self.size == 1 or self.ledger is None or not self.ledger.compares:
            return
        step = partial(self._refuse, operation, signatures.refused(error))
        if not self.queue.run(step):
            self.queue.start(step, self._work(operation, []))

    def _refuse(self, operation: str, signature: Signature) -> None:
        number, members = self.line.started, self.attendance
        members.words[members.place] = number << CALL_BITS
        self.history.append((number, operation, monotonic(), signature, False))
        self.line.ended = number
        members.wait_for_all(number + 1)
        watchdog.write(self.ledger)

    @contextmanager
    def _waiting(self, operation: str) -> Iterator[None]:
        """Registers a blocking collective of this thread while it waits for its turn. Does nothing in callbacks.

        If two threads are in blocking collectives of one group at once, their order may differ on another rank. Data of
        different operations would then meet. Threads that take a lock for each call are never here at the same time.

        Raises:
            ConcurrentCollectives: Another thread is in a blocking collective of this group.
        """
        thread = get_ident()
        if thread == self.queue.thread_id:  # a callback has a fixed place in the order
            yield
            return
        with self._waiting_guard:
            others = [other for number, other in self._waiting_calls.items() if number != thread]
            until = monotonic() + 10.0
            while (current := self.under_way()) is None and self.line.running.locked() and monotonic() < until:
                sleep(0)  # who holds it is about to say what it does
            if current is not None and current.work is None:
                others.append(current.operation)
            elif current is None and monotonic() >= until:
                others.append("a collective that it has not begun")
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
        """Ends the queue after the queued operations and refuses further use.

        Returns False if the group has failed before, or if an operation does not end.
        """
        if not isinstance(self.broken, GroupDestroyed):
            deadline = monotonic() + timeout_s
            for work in self.queue.works():
                work.awaited = work.awaited or monotonic()  # so that the watchdog says who has not come
            try:
                while not (ended := self.queue.close(0.1)) and self.broken is None and monotonic() < deadline:
                    pass
            finally:  # also after an exception of a signal's handler
                failed = self.broken is not None
                self.broken = GroupDestroyed("the group has been destroyed")
            return ended and not failed
        return False
