"""Slots in a GPU's memory from which other processes of the host take what is sent to them."""

from __future__ import annotations

import torch
from torch import Tensor

from mpicoll.cuda import ipc

SLOTS = 4


class Outbox:
    """One per group and device.

    Args:   buffer: bytes, SLOTS of equal size. record: what others open it by.
    """

    def __init__(self, buffer: Tensor, record: bytes) -> None:
        self.record = record
        self._slots: list[Tensor] = list(buffer.view(SLOTS, -1))
        self._free = list(range(SLOTS))

    @classmethod
    def make(cls, device: torch.device, slot_nbytes: int) -> Outbox | None:
        """None: there is no room, or this memory cannot be shared."""
        buffer = ipc.allocate(device, SLOTS * slot_nbytes)
        record = None if buffer is None else ipc.share(buffer)
        return None if buffer is None or record is None else cls(buffer, record)

    def take(self) -> int | None:
        """A free slot's number, if there is one."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give_back(self, number: int) -> None:
        self._free.append(number)

    def slot(self, number: int) -> Tensor:
        return self._slots[number]
