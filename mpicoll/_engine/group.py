"""What a group is, whatever it does: its name, its ranks, its channel, whether it can still be used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from time import monotonic
from typing import TypeVar

from torch import Tensor
from torch.autograd import profiler

from mpicoll._device.collectives import Gpus
from mpicoll._device.messages import ANNOUNCEMENT
from mpicoll._host.carrier import Carrier
from mpicoll._host.collectives import Host
from mpicoll._host.thresholds import Choices
from mpicoll._log import Algorithms
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.datatypes import INT_MAX
from mpicoll._mpi.errors import MPIException, translate
from mpicoll._mpi.topology import Topology
from mpicoll._progress import spans, watchdog
from mpicoll._progress.matching import Unmatched
from mpicoll._progress.progress import Lane
from mpicoll._progress.watchdog import EVERYBODY, inside
from mpicoll._progress.work import Work, found_by_tensors
from mpicoll.errors import ConcurrentCollectives, GroupDestroyed, GroupFailed, MpicollError, OperationTimeout, TruncationError

T = TypeVar("T")


class Group:
    """One process group, seen from one of its ranks.

    ``broken``: None, or why the group cannot be used any more (destroyed, an operation failed, forked).
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        global_ranks: tuple[int, ...],
        timeout_s: float,
        topology: Topology,
        choices: Choices,
    ) -> None:
        self.name = name
        self.channel = channel
        self.global_ranks = global_ranks
        self.timeout_s = timeout_s
        self.rank: int = channel.comm.Get_rank()
        self.size: int = channel.comm.Get_size()
        self.tag_ub = channel.runtime.tag_ub
        self.serialized = channel.runtime.serialized
        self.gpus = choices.gpus  # some rank sees a GPU
        #: bytes of a message between two ranks that can be one blocking MPI call
        self.longest_plain = ANNOUNCEMENT - 1 if choices.gpus else INT_MAX
        self.broken: MpicollError | None = None
        self.closer: Callable[[], None] = lambda: None  # set by `groups`, which knows the group by name
        self.lane = Lane(name)
        self._waiting_guard = Lock()  # guards _waiting_calls
        self._waiting_calls: dict[int, str] = {}  # by thread: the blocking collective that waits for its turn
        algorithms = Algorithms(name, self.rank, self.size)
        self.carrier = Carrier(channel, topology, choices, self.lane, algorithms)
        self.host = Gpus(channel, self.carrier, choices) if choices.gpus else Host(channel, self.carrier)
        #: the receives that are matched here; None: MPI matches them, or parcels do
        self.unmatched = Unmatched(channel) if channel.runtime.overruns and not choices.gpus else None
        watchdog.watch(timeout_s)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: rank {self.rank} of {self.size}{', unusable' if self.broken else ''}>"

    def where(self, operation: str) -> str:
        """The words by which errors name an operation of this group on this rank."""
        return f"{operation} on group {self.name!r} (rank {self.rank} of {self.size})"

    def set_timeout(self, timeout_s: float) -> None:
        """For what starts from now on."""
        self.timeout_s = timeout_s
        watchdog.watch(timeout_s)

    def check_usable(self, operation: str) -> None:
        if self.broken is not None:
            raise type(self.broken)(f"{self.where(operation)}: {self.broken}")

    def fail(self, error: Exception) -> None:
        """After an error inside MPI, or an operation that did not end, ranks may be out of step: refuse everything."""
        if self.broken is None:
            self.broken = GroupFailed(f"the group is unusable since an operation failed: {error}")

    def guarded(
        self, operation: str, transfer: Callable[..., T], peer: int | None = EVERYBODY, arguments: Sequence[object] = ()
    ) -> T:
        """Runs MPI calls, ``transfer(*arguments)``, in this thread: watched, MPI's errors turned into ours.

        Args:   peer: the group rank that it waits for; EVERYBODY: a collective; None: a receive from anybody.
        """
        thread = get_ident()
        inside[thread] = (operation, self, monotonic(), peer)
        try:
            return transfer(*arguments)
        except MPIException as raw:
            error = translate(raw, self.where(operation))
            if peer == EVERYBODY or not isinstance(error, TruncationError):
                self.fail(error)
            raise error from raw
        finally:
            del inside[thread]

    def at_once(self, operation: str, call: Callable[..., None], *arguments: object) -> bool:
        """The bare path: one MPI call in this thread, now; False, and nothing done, if something is before it.

        The same as ``start`` with one call and no delivery, at a third of its price (8 bytes: 2 us instead of 6).
        """
        lane = self.lane
        if self.broken is not None or lane.queued or profiler._is_profiler_enabled or not lane.turn.acquire(False):
            return False
        lane.begun += 1
        thread = get_ident()
        inside[thread] = (operation, self, monotonic(), EVERYBODY)
        try:
            call(*arguments)
        except MPIException as raw:
            error = translate(raw, self.where(operation))
            self.fail(error)
            raise error from raw
        finally:
            del inside[thread]
            lane.turn.release()
        return True

    def work(self, operation: str, tensors: list[Tensor]) -> Work:
        """The handle for an operation that is about to start."""
        work = Work(self.where(operation), tensors, self.timeout_s)
        work._on_timeout = self._timed_out
        return work

    def _timed_out(self, error: OperationTimeout) -> None:
        self.fail(error)

    def start(
        self,
        operation: str,
        transfer: Callable[[], None],
        tensors: list[Tensor],
        async_op: bool,
        reads: Sequence[Tensor] | None = None,
    ) -> Work | None:
        """Runs a collective in its turn: at once and in this thread, or behind what is queued.

        Args:   transfer: the MPI calls, and the delivery into ``tensors``.
                reads: its inputs, for the profiler; None: ``tensors``, which it reduces or fills in place.
        """
        if self.broken is not None:
            self.check_usable(operation)

        def step() -> None:
            if self.broken is not None:  # by the operation before, which was under way when this one was queued
                self.check_usable(operation)
            self.guarded(operation, transfer)

        def begin() -> Work:
            return self.lane.start(step, self.work(operation, tensors))

        def run() -> None:
            self.lane.run(step, lambda: self.work(operation, tensors), lambda: self._waiting(operation))

        span = self._span(operation, tensors if reads is None else reads) if spans.on() else None
        if async_op:
            return found_by_tensors(begin() if span is None else spans.asynchronous(span, begin))
        if span is None:
            run()
        else:
            with span:
                run()
        return None

    @contextmanager
    def _waiting(self, operation: str) -> Iterator[None]:
        """While a blocking collective of this thread waits for its turn: it is the only one, except in callbacks.

        Two threads that are in blocking collectives of one group at once may have their turns in another order on another rank,
        where data of different operations would then meet. Threads that take a lock for each call never meet here.

        Raises: ConcurrentCollectives: another thread is in a blocking collective of this group.
        """
        thread = get_ident()
        if thread == self.lane.thread_id:  # a callback, which has a place in the order
            yield
            return
        with self._waiting_guard:
            others = [other for number, other in self._waiting_calls.items() if number != thread]
            others += [
                entry[0]
                for number, entry in list(inside.items())
                if entry[1] is self and entry[3] == EVERYBODY and number not in (thread, self.lane.thread_id)
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
        return spans.Span(operation, self, inputs, self.lane.issued() + 1)

    def end(self, timeout_s: float) -> bool:
        """Ends the lane after what is queued and refuses further use; False if something is stuck in it."""
        if not isinstance(self.broken, GroupDestroyed):
            failed = self.broken is not None
            ended = self.lane.close(0.1 if failed else timeout_s)
            self.broken = GroupDestroyed("the group has been destroyed")
            return ended and not failed
        return False
