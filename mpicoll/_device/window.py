"""The window of a node in GPU memory: ranks open each other's slots. The words that announce data are in host memory.

The buffer of a rank holds its two slots, and its part of three results: a result stays where it was reduced. Work that a rank
launches has ended before the rank announces it, so that the GPUs of other ranks see it. Called inside `streams.internal_streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mpicoll._algorithms.shared_memory import round_up
from mpicoll._algorithms.window import LINE, Window, words_nbytes
from mpicoll._device import streams
from mpicoll._device.regions import Regions
from mpicoll._mpi.shared_segment import Segment

SLOTS, RESULTS = 2, 3


class DeviceWindow(Window):
    """The window as one rank sees it.

    Args:
        segment: Host memory of `words` bytes, for the words.
        buffers: Buffers of all ranks, of `buffer_nbytes` bytes each. This rank's entry is the buffer that it has allocated.
        rank, chunk, pause, spins: As for `Window`.
    """

    def __init__(
        self,
        segment: Segment,
        buffers: Sequence[Tensor],
        rank: int,
        chunk: int,
        pause: Callable[[int], Callable[[], None]],
        spins: int,
    ) -> None:
        super().__init__(segment, rank, len(buffers), chunk, pause, spins)
        self.device = buffers[rank].device
        self._buffers = buffers
        self._numbers = words_nbytes(self.size)

    @staticmethod
    def words(size: int) -> int:
        """Bytes of the segment: the words, and the numbers that each rank writes in two turns."""
        return words_nbytes(size) + SLOTS * size * _numbers_nbytes(size)

    @staticmethod
    def buffer_nbytes(chunk: int) -> int:
        return (SLOTS + RESULTS) * chunk

    def reach(self, tensors: Iterable[Tensor]) -> None:
        """Sets the GPU memory, as bytes, that the next operation copies from and to."""
        self.copy = Regions([*self._buffers, *tensors]).copy

    def slot(self, turn: int, rank: int) -> int:
        return self._buffers[rank].data_ptr() + (turn & 1) * self.chunk

    def collect(self, turn: int, to: int, nbytes: int, slice_: int) -> None:
        for rank, buffer in enumerate(self._buffers):
            low, high = min(nbytes, rank * slice_), min(nbytes, (rank + 1) * slice_)
            self.copy(to + low, buffer.data_ptr() + self._result(turn) + low, high - low)

    def view(self, dtype: torch.dtype, turn: int, place: int, offset: int, nbytes: int) -> Tensor:
        rank, first = (self.rank, self._result(turn)) if place == self.size else (place, (turn & 1) * self.chunk)
        return self._buffers[rank][first + offset : first + offset + nbytes].view(dtype)

    def _result(self, turn: int) -> int:
        return (SLOTS + turn % RESULTS) * self.chunk

    def _numbers_offset(self, turn: int, rank: int) -> int:
        return self._numbers + ((turn & 1) * self.size + rank) * _numbers_nbytes(self.size)

    def lay(self, turn: int) -> None:
        streams.wait_for_internal(self.device)
        super().lay(turn)

    def take(self, turn: int) -> None:
        streams.wait_for_internal(self.device)
        super().take(turn)


def _numbers_nbytes(size: int) -> int:
    return round_up(2 * size * 8, LINE)
