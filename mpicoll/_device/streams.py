"""The uses of torch.cuda: order with the caller's streams, pinned memory, copies. Tests replace this module by a small fake.

# Note [Order]
# [1] marks: when an operation is called, an event is recorded on the current stream of each device. All that the caller has
#     launched is before this event.
# [2] internal_streams: the operation runs on streams that wait for [1]. The work on these streams ends before the operation
#     ends. So what the caller launches after wait(), on any stream, sees the result, and no internal stream still uses memory
#     that is freed then.
# [3] fetch: memory of a device is copied to pinned memory, on another internal stream. This stream is behind [1], and behind [2]
#     as far as `wait_for_launched` says, so that copies run in both directions at a time. MPI, or a CPU kernel, sees a byte only
#     after `arrived`.
#
# Messages have streams of their own: the thread that moves them must not wait for the work that collectives wait for.

# Note [Threads]
# A new thread has device number 0 and no context. If it made a context there by accident, that would take some 100 MB of a GPU
# that another rank uses. And an MPI that takes GPU memory may ask for the thread's context whenever it makes progress. So each
# background thread takes the first device that the program hands over (`settle_in`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

Mark: TypeAlias = "tuple[torch.device, Any]"
INTERNAL, OUT, MESSAGES, MESSAGES_OUT = range(4)  # internal streams of a device

_streams: dict[tuple[torch.device, int], Any] = {}
_making = threading.Lock()
_first: list[torch.device] = []  # the first device that the program has handed over
_thread = threading.local()


# -- order -------------------------------------------------------------------------------------------------------------


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_capture(operation: str, device: torch.device) -> None:
    """Raises RuntimeError if the current stream is being captured into a CUDA graph, in which nothing may wait."""
    if capturing():
        raise RuntimeError(
            f"{operation}: a tensor is on {device}, whose stream is being captured into a CUDA graph; MPI cannot be "
            "captured: communicate outside of torch.cuda.graph(), or use NCCL there"
        )


def marks(devices: Iterable[torch.device]) -> list[Mark]:
    """[1] Records events on the current streams of the devices."""
    made = []
    for device in dict.fromkeys(devices):
        if not _first:
            _first.append(device)
        made.append((device, _event(torch.cuda.current_stream(device))))
    return made


def passed(marks: Sequence[Mark]) -> bool:
    """True if the devices have reached the marks. Does not wait."""
    return all(event.query() for _, event in marks)


@contextmanager
def internal_streams(marks: Sequence[Mark]) -> Iterator[None]:
    """[2] Work that this thread launches inside, on these devices, is behind the marks. It has ended when the context exits."""
    with ExitStack() as stack:
        for device, event in marks:
            stack.enter_context(torch.cuda.stream(_stream(device, INTERNAL)))
            for which in (INTERNAL, OUT):
                _stream(device, which).wait_event(event)
        try:
            yield
        finally:
            for device, _ in marks:
                for which in (INTERNAL, OUT):
                    _stream(device, which).synchronize()


def wait_for_launched(devices: Iterable[torch.device]) -> None:
    """Inside `internal_streams`: memory fetched from now on is behind the work launched there until now."""
    for device in dict.fromkeys(devices):
        _stream(device, OUT).wait_stream(torch.cuda.current_stream(device))


def wait_for_internal(device: torch.device) -> None:
    """Inside `internal_streams`: returns when the launched work has ended, so that others see it."""
    torch.cuda.current_stream(device).synchronize()


def caller(device: torch.device) -> Any:
    """The current stream, as an argument for `keep_for`."""
    return torch.cuda.current_stream(device)


def keep_for(stream: Any, memory: Tensor) -> None:
    """Keeps memory that was allocated inside `internal_streams` while the program uses it on ``stream``, a stream of its own."""
    memory.record_stream(stream)


# -- copies ------------------------------------------------------------------------------------------------------------


def fetch(memory: Tensor, stream: int = OUT) -> tuple[Tensor, Any]:
    """[3] Copies to pinned memory: contiguous values, which are there once the event has `arrived`.

    Called inside `internal_streams`, or with MESSAGES_OUT once the marks have `passed`.
    """
    values, internal = pinned(memory.shape, memory.dtype), _stream(memory.device, stream)
    with torch.cuda.stream(internal):
        values.copy_(memory, non_blocking=values.is_pinned())
    return values, _event(internal)


def push(memory: Tensor, values: Tensor, stream: int = INTERNAL) -> Any:
    """Copies values, in pinned memory or on a device, into memory of a device.

    The copy has ended once the event has `arrived`; ``values`` may be freed before that. Called inside `internal_streams`, or
    with MESSAGES once the marks have `passed`.
    """
    return launch(memory.device, lambda: memory.copy_(values, non_blocking=not values.is_cpu or values.is_pinned()), stream)


def launch(device: torch.device, kernels: Callable[[], object], stream: int) -> Any:
    """Calls ``kernels`` with this internal stream. The kernels have ended once the event has `arrived`."""
    internal = _stream(device, stream)
    with torch.cuda.stream(internal):
        kernels()
    return _event(internal)


def arrived(event: Any, wait: bool = True) -> bool:
    """True if the work launched before the event has ended. With ``wait``, waits for that."""
    if wait:
        event.synchronize()
        return True
    return bool(event.query())


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised pinned memory (torch keeps it for the next time), or plain memory if none can be pinned."""
    with torch.inference_mode(False):
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError:  # no pinned memory
            return torch.empty(shape, dtype=dtype, device="cpu")


def onto(device: torch.device, memory: Tensor) -> Tensor:
    """The same values on ``device``; the tensor itself if it is already there."""
    return memory.to(device)


def settle(device: torch.device) -> None:
    """Returns when the device has finished all its work."""
    torch.cuda.synchronize(device)


# -- devices and threads -----------------------------------------------------------------------------------------------


def seen() -> bool:
    """True if this rank sees a GPU. Asks without starting CUDA, so that processes may still be forked."""
    return torch.cuda.device_count() > 0


def available() -> bool:
    return torch.cuda.is_available()


def own_device(place: int) -> torch.device:
    """The device of rank number ``place`` on its host, made the current device. Ranks take the visible GPUs in turn."""
    device = torch.device("cuda", place % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device current in this thread. A CUDA-aware MPI may query the thread's current device."""
    return torch.cuda.device(device)


def settle_in() -> None:
    """Called repeatedly by our background threads; binds each to the first device in use. See Note [Threads]."""
    if _first and not hasattr(_thread, "device"):
        _thread.device = _first[0]
        torch.cuda.set_device(_first[0])
        torch.cuda.current_stream(_first[0]).synchronize()  # makes the device's context this thread's


def _stream(device: torch.device, which: int) -> Any:
    """An internal stream, made once, by the thread that comes first."""
    stream = _streams.get((device, which))
    if stream is None:
        with _making:
            stream = _streams.get((device, which))
            if stream is None:
                stream = _streams[device, which] = torch.cuda.Stream(device)
    return stream


def _event(stream: Any) -> Any:
    event = torch.cuda.Event()
    event.record(stream)
    return event
