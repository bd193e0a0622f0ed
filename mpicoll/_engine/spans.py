"""Events for torch's profilers. They have the names that torch's own backends use, whichever function started the operation.

    mpi:all_reduce         [[256]]: the shapes of the inputs, with record_shapes=True
    record_mpi_comms       just inside it, with arguments: operation, group and its ranks, sequence number, an id that is the same
                           on all ranks, dtype, elements, bytes

An event has the name of the operation, or that in TITLES: the name in ProcessGroupMPI (of a torch that is built with MPI),
otherwise ``mpi:`` and the name in ProcessGroupGloo. An event whose name is in one of their sources has the same inputs as there.
It lasts from the call to the end of the operation. It belongs to the calling thread, whichever thread ends it.

# Note [Arguments in an event of their own]
# A torch event has inputs or arguments, not both. A RecordFunction that a Future ends takes tensors only, and one that takes
# arguments is lost when another thread ends it. The NCCL backend also has a second event, record_param_comms. We use its keys,
# but not its name: torch 2.13 crashes if an event of that name does not come from its own C++ code.

# Note [Asynchronous events]
# All events of torch's backends are asynchronous, also those of blocking operations, and programs read `is_async`. Python cannot
# set that flag, but torch sets it for an event that ends in another thread than it began in. So an operation that ends in its
# caller's thread lets a thread of `_Events` end its event (25 us, only while a profiler records).

# Note [Events under way when the profiler stops]
# torch's recorder frees its events when the profiler stops. An event that ends later writes into freed memory, and the heap is
# corrupted some time after. So an asynchronous event ends before any thread learns that its operation has completed. All events
# that are still open end just before the recorder stops: the first Span wraps the function that stops it.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._autograd import _record_function_with_args_enter
from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler
from torch.futures import Future

from mpicoll._engine.work import Work
from mpicoll._faults.group_state import GroupState

F = TypeVar("F", bound=Callable[..., Any])

# The names of events that are not ``mpi:`` and the name of the engine's operation. reduce_scatter, monitored_barrier, and what
# torch does not have, have no event in other backends; Gloo builds reduce_scatter from all_reduce.
TITLES = {
    "all_reduce_coalesced": "mpi:all_reduce",
    "reduce_scatter_single": "mpi:reduce_scatter",
    "reduce_scatter_single_coalesced": "mpi:reduce_scatter",
    "all_gather_coalesced": "mpi:all_gather",
    "all_gather_single": "mpi:all_gather",
    "all_gather_single_coalesced": "mpi:all_gather",
    "all_to_all_single": "mpi:all_to_all",
    "isend": "mpi:send",
    "irecv": "mpi:recv",
    "recv from anybody": "mpi:recvAnySource",
}
ARGUMENTS = "record_mpi_comms"


class Span:
    """An event that has begun. It ends once, in any thread, at the latest when the profiler stops.

    ``number`` is the collective's number in its group, counted from 1 in the order of the calls; None for a message.
    """

    def __init__(self, operation: str, group: GroupState, inputs: Sequence[Tensor], number: int | None = None) -> None:
        _end_all_when_the_profiler_stops()
        self._thread = threading.get_ident()
        self._ended: Future[None] = Future()
        with _events.guard:
            begun: Any = _record_function_with_args_enter(TITLES.get(operation, f"mpi:{operation}"), *inputs)
            # The callback of the Future carries this thread's profiler state into the thread that ends the event.
            with torch._C.DisableTorchFunctionSubclass():
                torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(begun, self._ended)
            _events.open.add(self)
        with _RecordFunctionFast(ARGUMENTS, [], _arguments(operation, group, inputs, number)):
            pass

    def end(self) -> None:
        """Ends the event. Does nothing if it has ended."""
        with _events.guard:
            if self not in _events.open:
                return
            _events.open.remove(self)
            if threading.get_ident() == self._thread:
                _events.end_elsewhere(self._ended)  # See Note [Asynchronous events]
            else:
                self._ended.set_result(None)


def _arguments(operation: str, group: GroupState, inputs: Sequence[Tensor], number: int | None) -> dict[str, str | int]:
    """Returns what torch's trace shows beside the event. The keys are those of record_param_comms."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in inputs})
    arguments: dict[str, str | int] = {
        "Collective name": operation,
        "dtype": " ".join(dtypes),
        "In msg nelems": sum(tensor.numel() for tensor in inputs),
        "In msg bytes": sum(map(_nbytes, inputs)),
        "Group size": group.size,
        "Process Group Name": group.name,
        "Process Group Ranks": str([*group.global_ranks]),
    }
    if number is not None:  # equal on all ranks of the group, as the id is
        arguments |= {"Seq": number, "Comms Id": zlib.crc32(f"{group.name} {number} {group.global_ranks}".encode())}
    return arguments


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else tensor._indices().nbytes + tensor._values().nbytes


def asynchronous(span: Span, begin: Callable[[], Work]) -> Work:
    """Begins an asynchronous operation. Its event lasts until its Work has completed, in any thread."""
    try:
        work = begin()
    except BaseException:
        span.end()
        raise
    work._on_completion(span.end)
    return work


def spanned(operation: str) -> Callable[[F], F]:
    """Decorates a point-to-point method ``(self, tensor, peer, tag)`` of a Group with an event."""
    immediate = operation in ("isend", "irecv")

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def wrapped(self: Any, tensor: Tensor, peer: int | None, tag: int = 0) -> Any:
            if not profiler._is_profiler_enabled or not isinstance(tensor, Tensor):
                return method(self, tensor, peer, tag)
            span = Span("recv from anybody" if peer is None else operation, self, [tensor])
            if immediate:
                return asynchronous(span, lambda: method(self, tensor, peer, tag))
            try:
                return method(self, tensor, peer, tag)
            finally:
                span.end()

        return wrapped  # type: ignore[return-value]

    return decorate


class _Events:
    """The events that are open, and a thread that ends events on behalf of the threads in which they began.

    The thread starts on first use, sleeps on ``_asked`` and ends when the profiler stops. ``guard`` guards ``open`` and the
    thread, which gets one request at a time. It is also held while the recorder stops.
    """

    def __init__(self) -> None:
        self.open: set[Span] = set()
        self.guard = threading.RLock()
        self._asked, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._event: Future[None] | None = None
        self._thread: threading.Thread | None = None

    def end_elsewhere(self, event: Future[None]) -> None:
        """Returns when the event has ended."""
        if self._thread is None or not self._thread.is_alive():  # a forked child has no such thread
            self._thread = threading.Thread(target=self._loop, name="mpicoll profiler events", daemon=True)
            self._thread.start()
        self._event = event
        self._asked.release()
        self._done.acquire()

    def close(self) -> None:
        """Ends all events, and the thread. The caller holds ``guard``."""
        for span in list(self.open):
            span.end()
        if self._thread is not None and self._thread.is_alive():
            self._event = None
            self._asked.release()
            self._thread.join()
        self._thread = None

    def _loop(self) -> None:
        while True:
            self._asked.acquire()
            if self._event is None:
                return
            self._event.set_result(None)
            self._done.release()


_events = _Events()


@functools.cache
def _end_all_when_the_profiler_stops() -> None:
    stop: Callable[[], Any] = profiler._disable_profiler  # type: ignore[attr-defined]

    @functools.wraps(stop)
    def wrapped() -> Any:
        with _events.guard:
            _events.close()
            return stop()

    profiler._disable_profiler = wrapped  # type: ignore[attr-defined]
