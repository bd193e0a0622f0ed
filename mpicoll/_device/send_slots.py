"""Slots in GPU memory from which other processes of the host copy the messages sent to them."""

from __future__ import annotations

import torch
from torch import Tensor

from mpicoll._device import ipc

SLOTS = 4


class SendSlots:
    """The send slots of one group on one device, in a buffer of bytes."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._records: dict[int, bytes] = {}
        self.slots: list[Tensor] = list(buffer.view(SLOTS, -1))
        self._free = list(range(SLOTS))

    @classmethod
    def make(cls, device: torch.device, slot_nbytes: int) -> SendSlots | None:
        """Allocates the slots; None if there is no room."""
        buffer = ipc.allocate(device, SLOTS * slot_nbytes)
        return None if buffer is None else cls(buffer)

    def record(self, dst: int) -> bytes:
        """The record by which receiver ``dst`` opens the buffer; empty if this memory cannot be shared."""
        if dst not in self._records:
            self._records[dst] = ipc.share(self._buffer) or b""
        return self._records[dst]

    def acquire(self) -> int | None:
        """The number of a free slot; None if no slot is free."""
        return self._free.pop() if self._free else None

    def release(self, number: int) -> None:
        self._free.append(number)
