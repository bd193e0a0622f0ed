"""What mpicoll asks of torch.cuda: order with the caller's streams, pinned memory, copies. Tests put a small fake in its place.

# Note [Order]
# [1] marks: when an operation is called, an event on the current stream of each device: all that the caller has launched is
#     before it.
# [2] ours: whoever carries the operation out does so on streams of ours, which wait for [1]; what they were given has ended
#     before the operation has. So what the caller launches after wait(), on any stream, sees the result, and memory that is
#     freed then is nobody's any more.
# [3] fetch: a device's memory on its way to pinned memory, on another stream of ours behind [1], so that copies go both ways at a
#     time; MPI, or a kernel of the CPU's, sees a byte only after `arrived`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

Mark: TypeAlias = "tuple[torch.device, Any]"


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph, in which nothing may wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def marks(devices: Iterable[torch.device]) -> list[Mark]:
    """[1]: events on the devices' current streams."""
    made = []
    for device in dict.fromkeys(devices):
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        made.append((device, event))
    return made


def passed(marks: Sequence[Mark]) -> bool:
    """Whether the devices have come to the marks; asks, and waits for nothing."""
    return all(event.query() for _, event in marks)


@contextmanager
def ours(marks: Sequence[Mark]) -> Iterator[None]:
    """[2]: what is launched inside, by this thread on these devices, is behind the marks; it has ended at the end."""
    with ExitStack() as stack:
        for device, event in marks:
            stream = _stream(device)
            stack.enter_context(torch.cuda.stream(stream))
            stream.wait_event(event)
            _fetching(device).wait_event(event)
        try:
            yield
        finally:
            for device, _ in marks:
                _stream(device).synchronize()
                _fetching(device).synchronize()


def fetch(memory: Tensor) -> tuple[Tensor, Any]:
    """[3], inside `ours`, or once the marks have `passed`: the same values, contiguous, in pinned memory, once the event has
    `arrived`.
    """
    values = pinned(memory)
    with torch.cuda.stream(_fetching(memory.device)):
        values.copy_(memory, non_blocking=values.is_pinned())
        event = torch.cuda.Event()
        event.record()
    return values, event


def arrived(event: Any, wait: bool = True) -> bool:
    """Whether what was launched before the event has ended; waits for that, or asks."""
    if wait:
        event.synchronize()
        return True
    return bool(event.query())


def push(memory: Tensor, values: Tensor) -> Any:
    """Inside `ours`, or once the marks have `passed`: copies values, of pinned memory or a device's, into a device's memory; it
    has ended once the event has `arrived`, and the values may go before.
    """
    with torch.cuda.stream(_stream(memory.device)):
        memory.copy_(values, non_blocking=not values.is_cpu or values.is_pinned())
        event = torch.cuda.Event()
        event.record()
    return event


def pinned(memory: Tensor) -> Tensor:
    """As much pinned memory (torch keeps it for the next time), or plain memory where there is none; not written yet."""
    with torch.inference_mode(False):
        try:
            return torch.empty(memory.shape, dtype=memory.dtype, pin_memory=True)
        except RuntimeError:  # none to be had
            return torch.empty(memory.shape, dtype=memory.dtype)


def onto(device: torch.device, memory: Tensor) -> Tensor:
    """The same values there, in the memory itself if it is there already."""
    return memory.to(device)


def wait_for_ours(device: torch.device) -> None:
    """Inside `ours`: returns when what was launched has ended, for others to see it."""
    torch.cuda.current_stream(device).synchronize()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Inside, the device is this thread's: an MPI that takes its memory may ask for the thread's."""
    return torch.cuda.device(device)


def settle(device: torch.device) -> None:
    """Returns when the device has done all that it was given."""
    torch.cuda.synchronize(device)


def own_device(place: int) -> torch.device:
    """Of rank number ``place`` on its host, made the current one: ranks share in turn the GPUs that they see."""
    device = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def available() -> bool:
    return torch.cuda.is_available()


@cache
def _stream(device: torch.device) -> Any:
    """Ours, for what this device does; made once."""
    return torch.cuda.Stream(device)


@cache
def _fetching(device: torch.device) -> Any:
    """Ours, for copies from this device; made once."""
    return torch.cuda.Stream(device)
