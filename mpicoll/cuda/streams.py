"""What mpicoll asks of torch.cuda: order with the caller's streams, pinned memory, copies. Tests put a small fake in its place.

# Note [Order]
# [1] mark: when an operation is called, an event on the current stream: all that the caller has launched is before it.
# [2] fetch: what MPI reads is copied behind [1], and the copy has ended before MPI sees a byte.
# [3] delivery: what MPI wrote is copied behind [1], too (a kernel launched before the call may still read the old values), on
#     a stream of its own; it has ended before the operation has. So what is launched after wait(), on any stream, sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph, in which nothing may wait."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def mark(tensor: Tensor) -> Any:
    """[1]: an event on the current stream of the tensor's device."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


def fetch(tensor: Tensor) -> Tensor:
    """[2]: the tensor's values, contiguous, in pinned memory (torch caches it), or in plain memory where there is none."""
    try:
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # none to be had
        return tensor.cpu().contiguous()
    values.copy_(tensor, non_blocking=True)
    mark(tensor).synchronize()
    return values


@contextmanager
def delivery(tensor: Tensor, after: Any) -> Iterator[None]:
    """[3]: copies inside go into ``tensor`` behind ``after``, and have ended at the end. Any thread may deliver."""
    stream = _stream(tensor.device)
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        yield
    stream.synchronize()


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
    """Ours, for copies into tensors of this device; made once."""
    return torch.cuda.Stream(device)
