"""The window of a node in GPU memory (CUDA IPC): each rank has a buffer, which the other ranks open.

The words that announce data are in host memory. The buffer of a rank holds its two slots, and its part of three results: a result
stays where it was reduced. Work that a rank launches has ended before the rank announces it, so that the GPUs of other ranks see
it. Called inside `streams.internal_streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mpicoll._algorithms.shared_memory import round_up
from mpicoll._algorithms.window import LINE, Window, words_nbytes
from mpicoll._algorithms.windows import Windows
from mpicoll._device import ipc, streams
from mpicoll._device.regions import Regions
from mpicoll._device.staging import Part
from mpicoll._mpi import shared_segment
from mpicoll._mpi.channel import Channel
from mpicoll._tensors import buffers

SLOT = 8 << 20  # bytes of a slot in GPU memory; each group that uses this path has five, 40 MiB
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
        segment: shared_segment.Segment,
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


class SharedDeviceMemory:
    """The window in GPU memory of one group, None until `make` has made it.

    ``windows``: those in host memory, which say how to wait; None: there cannot be one.
    """

    def __init__(self, channel: Channel, windows: Windows | None) -> None:
        self._channel = channel
        self._windows = windows
        self.window: DeviceWindow | None = None

    def make(self, device: torch.device) -> bool:
        """Makes the window on first use (then collective). Returns False, for ever, if a rank could not make its window."""
        if self.window is None and self._windows is not None:
            self.window = self._new_window(device, self._windows)
            self._windows = self._windows if self.window is not None else None
        return self._windows is not None

    def _new_window(self, device: torch.device, windows: Windows) -> DeviceWindow | None:
        comm = self._channel.comm
        rank, size = comm.Get_rank(), comm.Get_size()
        buffer, records = self._shared_buffer(device)
        received = comm.alltoall(records)  # from every rank, for this rank
        opened = [
            buffer if other == rank else None if buffer is None or record is None else ipc.opened(record, buffer.device)
            for other, record in enumerate(received)
        ]
        words = shared_segment.create(comm, DeviceWindow.words(size))
        usable = [memory for memory in opened if memory is not None]
        if not all(comm.allgather(len(usable) == size)) or words is None:
            return None
        return DeviceWindow(words, usable, rank, SLOT, windows.pause, windows.spins)

    def _shared_buffer(self, device: torch.device) -> tuple[Tensor | None, list[bytes | None]]:
        """Returns this rank's buffer and a record for each other rank; None on any error, because the others wait for a reply."""
        rank, size = self._channel.comm.Get_rank(), self._channel.comm.Get_size()
        nothing: list[bytes | None] = [None] * size
        try:
            buffer = ipc.allocate(device, DeviceWindow.buffer_nbytes(SLOT))
            records = nothing if buffer is None else [ipc.share(buffer) if r != rank else None for r in range(size)]
        except Exception:  # noqa: BLE001  the first use of a GPU may raise any exception
            return None, nothing
        return buffer, records

    @contextmanager
    def reaching(self, *memories: Tensor) -> Iterator[DeviceWindow]:
        """Gives the window for an operation on these memories. The window forgets them at the end."""
        assert self.window is not None
        self.window.reach(buffers.raw(memory) for memory in memories)
        try:
            yield self.window
        finally:
            self.window.reach(())

    @contextmanager
    def here(self, *parts: Part) -> Iterator[list[Tensor]]:
        """Gives the parts' memory on the window's device: the memory itself, or copies that are copied back at the end."""
        assert self.window is not None
        device = self.window.device
        if all(part.memory.device == device for part in parts):
            yield [part.memory for part in parts]
            return
        with streams.internal_streams(streams.marks([device])):
            copies = [streams.onto(device, part.memory) for part in parts]
            yield copies
            for part, copy in zip(parts, copies, strict=True):
                if part.written and copy is not part.memory:
                    part.memory.copy_(copy)

    def close(self) -> None:
        """Releases the memory of the other ranks. torch keeps this rank's memory until the other ranks have released it, too."""
        self.window = self._windows = None
