"""The GPU memory that the ranks of a node share: each rank has a buffer, which the other ranks open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mpicoll._algorithms.windows import Windows
from mpicoll._device import ipc, streams
from mpicoll._device.staging import Part
from mpicoll._device.window import DeviceWindow
from mpicoll._mpi import shared_segment
from mpicoll._mpi.channel import Channel
from mpicoll._tensors import buffers

SLOT = 8 << 20  # bytes of a slot in GPU memory; each group that uses this path has five, 40 MiB


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
