"""Spans for torch.profiler: each operation from its start to its end, by whichever door it came.

    mpi::all_reduce(float32, 4096 bytes, group 0)

Everything is in the span's name, since a name is all that every version of torch keeps without ``record_shapes``; so
``key_averages()`` tells sizes, dtypes and groups apart. bytes: of the tensors that the operation writes on this rank, or reads
where it writes none. An asynchronous operation's span lasts until it has completed, and says so.

# Note [Spans under way when the profiler stops]
# torch's recorder frees its events when the profiler stops, and a span that ends later writes into them: the heap is
# corrupted some time after. So the end of an asynchronous span comes before anybody learns that its operation has
# completed, and all spans that are still open end just before the recorder stops, which the first of them sees to by
# wrapping the function that stops it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.autograd.profiler import record_function
from torch.futures import Future

from mpicoll.engine.work import Work

__all__ = ["asynchronous", "on", "span", "spanned"]

F = TypeVar("F", bound=Callable[..., Any])

_open: set[OpenSpan] = set()
_guard = threading.RLock()  # guards _open, and is held from before the recorder stops until after it


def on() -> bool:
    """Whether a profiler is recording (30 ns)."""
    return profiler._is_profiler_enabled


def span(operation: str, group: str, tensors: Sequence[Tensor], async_op: bool = False) -> record_function:
    """The span of an operation that is about to start, for a ``with`` round it."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    parts = [" ".join(dtypes)] if dtypes else []
    parts += [f"{sum(map(_nbytes, tensors))} bytes", f"group {group}"]
    return record_function(f"mpi::{operation}({', '.join(parts)}{', async' if async_op else ''})")


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else tensor._indices().nbytes + tensor._values().nbytes


def asynchronous(operation: str, group: str, tensors: Sequence[Tensor], begin: Callable[[], Work]) -> Work:
    """Begins an asynchronous operation; its span lasts until its Work has completed, in whichever thread that happens."""
    opened = OpenSpan(span(operation, group, tensors, async_op=True))
    try:
        work = begin()
    except BaseException:
        opened.end()
        raise
    work._on_completion(opened.end)
    return work


def spanned(operation: str) -> Callable[[F], F]:
    """For a point-to-point method ``(self, tensor, peer, tag)`` of a Group: a span of that name round it."""
    immediate = operation in ("isend", "irecv")

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def wrapped(self: Any, tensor: Tensor, peer: int | None, tag: int = 0) -> Any:
            if not profiler._is_profiler_enabled:
                return method(self, tensor, peer, tag)
            if immediate:
                return asynchronous(operation, self.name, [tensor], lambda: method(self, tensor, peer, tag))
            with span(operation, self.name, [tensor]):
                return method(self, tensor, peer, tag)

        return wrapped  # type: ignore[return-value]

    return decorate


class OpenSpan:
    """A span that has begun; it may end in any thread, once. See Note [Spans under way when the profiler stops]."""

    def __init__(self, begun: record_function) -> None:
        _end_all_when_the_profiler_stops()
        # torch ends a span of another thread only by way of a Future, whose callback carries the profiler's thread state.
        self._ended: Future[None] = Future()
        with _guard:
            begun.__enter__()
            begun._call_end_callbacks_on_future(self._ended)
            _open.add(self)

    def end(self) -> None:
        with _guard:
            if self in _open:
                _open.remove(self)
                self._ended.set_result(None)


@functools.cache
def _end_all_when_the_profiler_stops() -> None:
    stop: Callable[[], Any] = profiler._disable_profiler  # type: ignore[attr-defined]

    @functools.wraps(stop)
    def wrapped() -> Any:
        with _guard:
            for opened in list(_open):
                opened.end()
            return stop()

    profiler._disable_profiler = wrapped  # type: ignore[attr-defined]
