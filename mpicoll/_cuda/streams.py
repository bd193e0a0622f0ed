"""What mpicoll asks of torch.cuda: order with the caller's streams, pinned memory, copies. Tests put a small fake in its place.

# Note [Order]
# [1] marks: when an operation is called, an event on the current stream of each device: all that the caller has launched is
#     before it.
# [2] ours: whoever carries the operation out does so on streams of ours, which wait for [1]; what they were given has ended
#     before the operation has. So what the caller launches after wait(), on any stream, sees the result, and memory that is
#     freed then is nobody's any more.
# [3] fetch: a device's memory on its way to pinned memory, on another stream of ours behind [1], and behind [2] as far as
#     `joined` says, so that copies go both ways at a time; MPI, or a kernel of the CPU's, sees a byte only after `arrived`.
#
# Messages have streams of their own: they are carried on by a thread that must not wait for what collectives wait for.

# Note [Threads]
# A new thread's device is number 0, and it has no context. What it would do by accident, make one there, takes some 100 MB of a
# GPU that another rank uses; and an MPI that takes GPU memory may ask for the thread's context whenever it makes progress. So
# threads of ours become those of the first device that the program hands over (`settle_in`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

Mark: TypeAlias = "tuple[torch.device, Any]"
OURS, OUT, MESSAGES, MESSAGES_OUT = range(4)  # streams of a device

_streams: dict[tuple[torch.device, int], Any] = {}
_making = threading.Lock()
_first: list[torch.device] = []  # that the program has handed over
_thread = threading.local()


# -- order -------------------------------------------------------------------------------------------------------------


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph, in which nothing may wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def marks(devices: Iterable[torch.device]) -> list[Mark]:
    """[1]: events on the devices' current streams."""
    made = []
    for device in dict.fromkeys(devices):
        if not _first:
            _first.append(device)
        made.append((device, _event(torch.cuda.current_stream(device))))
    return made


def passed(marks: Sequence[Mark]) -> bool:
    """Whether the devices have come to the marks; asks, and waits for nothing."""
    return all(event.query() for _, event in marks)


@contextmanager
def ours(marks: Sequence[Mark]) -> Iterator[None]:
    """[2]: what is launched inside, by this thread on these devices, is behind the marks; it has ended at the end."""
    with ExitStack() as stack:
        for device, event in marks:
            stack.enter_context(torch.cuda.stream(_stream(device, OURS)))
            for which in (OURS, OUT):
                _stream(device, which).wait_event(event)
        try:
            yield
        finally:
            for device, _ in marks:
                for which in (OURS, OUT):
                    _stream(device, which).synchronize()


def joined(devices: Iterable[torch.device]) -> None:
    """Inside `ours`: what is fetched from now on is behind what was launched there until now."""
    for device in dict.fromkeys(devices):
        _stream(device, OUT).wait_stream(torch.cuda.current_stream(device))


def wait_for_ours(device: torch.device) -> None:
    """Inside `ours`: returns when what was launched has ended, for others to see it."""
    torch.cuda.current_stream(device).synchronize()


def caller(device: torch.device) -> Any:
    """The current stream: for `kept_for`."""
    return torch.cuda.current_stream(device)


def kept_for(stream: Any, memory: Tensor) -> None:
    """Memory that was allocated inside `ours` and that the program goes on with, on a stream of its own."""
    memory.record_stream(stream)


# -- copies ------------------------------------------------------------------------------------------------------------


def fetch(memory: Tensor, stream: int = OUT) -> tuple[Tensor, Any]:
    """[3], inside `ours`, or of MESSAGES_OUT once the marks have `passed`: the same values, contiguous, in pinned memory, once
    the event has `arrived`.
    """
    values, mine = pinned(memory.shape, memory.dtype), _stream(memory.device, stream)
    with torch.cuda.stream(mine):
        values.copy_(memory, non_blocking=values.is_pinned())
    return values, _event(mine)


def push(memory: Tensor, values: Tensor, stream: int = OURS) -> Any:
    """Inside `ours`, or of MESSAGES once the marks have `passed`: copies values, of pinned memory or a device's, into a device's
    memory; it has ended once the event has `arrived`, and the values may go before.
    """
    return launch(memory.device, lambda: memory.copy_(values, non_blocking=not values.is_cpu or values.is_pinned()), stream)


def launch(device: torch.device, kernels: Callable[[], object], stream: int) -> Any:
    """Calls ``kernels`` with this stream; they have ended once the event has `arrived`."""
    mine = _stream(device, stream)
    with torch.cuda.stream(mine):
        kernels()
    return _event(mine)


def arrived(event: Any, wait: bool = True) -> bool:
    """Whether what was launched before the event has ended; waits for that, or asks."""
    if wait:
        event.synchronize()
        return True
    return bool(event.query())


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Pinned memory (torch keeps it for the next time), or plain memory where there is none; not written yet."""
    with torch.inference_mode(False):
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError:  # none to be had
            return torch.empty(shape, dtype=dtype, device="cpu")


def onto(device: torch.device, memory: Tensor) -> Tensor:
    """The same values there, in the memory itself if it is there already."""
    return memory.to(device)


def settle(device: torch.device) -> None:
    """Returns when the device has done all that it was given."""
    torch.cuda.synchronize(device)


# -- devices and threads -----------------------------------------------------------------------------------------------


def seen() -> bool:
    """Whether this rank sees a GPU; asks without starting CUDA, so that processes may still be forked."""
    return torch.cuda.device_count() > 0


def available() -> bool:
    return torch.cuda.is_available()


def own_device(place: int) -> torch.device:
    """Of rank number ``place`` on its host, made the current one: ranks share in turn the GPUs that they see."""
    device = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def on(device: torch.device) -> AbstractContextManager[object]:
    """Inside, the device is this thread's: an MPI that takes its memory may ask for the thread's."""
    return torch.cuda.device(device)


def settle_in() -> None:
    """Called now and then by threads of ours; see Note [Threads]."""
    if _first and not hasattr(_thread, "device"):
        _thread.device = _first[0]
        torch.cuda.set_device(_first[0])
        torch.cuda.current_stream(_first[0]).synchronize()  # makes the device's context this thread's


def _stream(device: torch.device, which: int) -> Any:
    """Ours; made once, whichever thread comes first."""
    found = _streams.get((device, which))
    if found is None:
        with _making:
            found = _streams.get((device, which))
            if found is None:
                found = _streams[device, which] = torch.cuda.Stream(device)
    return found


def _event(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event
