"""Moves GPU memory through host memory, chunk after chunk, so that all transfers that can run at the same time do:

    chunk k + 1    device -> pinned                     (a stream of its own)
    chunk k                 pinned -> MPI -> pinned     (this thread)
    chunk k - 1                              pinned -> device

Called inside _device/streams.internal_streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpicoll._algorithms.blocks import pieces
from mpicoll._device import streams

CHUNK = 8 << 20  # bytes; the bus of a GPU takes some 0.3 ms for it, the launch of a copy 10 us


@dataclass(frozen=True)
class Part:
    """Memory, or a view of memory, that an operation reads, writes, or both."""

    memory: Tensor
    read: bool
    written: bool


class StagedCopy:
    """A part on its way to host memory and back."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._event: Any = None
        memory = part.memory
        self._values, self._event = streams.fetch(memory) if part.read else (streams.pinned(memory.shape, memory.dtype), None)

    def values(self) -> Tensor:
        """The values in host memory; waits until they are there."""
        if self._event is not None:
            streams.arrived(self._event)
        return self._values

    def back(self) -> None:
        """Starts the copy back to the device, if the part is written."""
        if self._part.written:
            streams.push(self._part.memory, self._values)


def carry_out(chunks: Sequence[Sequence[Part]], call: Callable[..., None]) -> None:
    """Calls ``call(*host memory of the parts)`` for each chunk in order. No two chunks may write the same memory."""
    # the memory may be a copy that was just launched
    streams.wait_for_launched(part.memory.device for chunk in chunks for part in chunk)
    following = [StagedCopy(part) for part in chunks[0]]
    for number in range(len(chunks)):
        copies = following
        following = [StagedCopy(part) for part in chunks[number + 1]] if number + 1 < len(chunks) else []
        call(*(copy.values() for copy in copies))
        for copy in copies:
            copy.back()


def extents(count: int, itemsize: int, rows: int = 1) -> list[tuple[int, int]]:
    """Begin and end of each chunk of ``count`` elements in each of ``rows`` rows. At least one chunk, which may be empty."""
    return pieces(count, max(1, CHUNK // (itemsize * rows)))
