"""The adapter for torch <= 2.13, which takes a subclass of ProcessGroup from a Python backend and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from mpicoll._c10d.names import devices
from mpicoll._c10d.operations import Operations

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator


class MpiProcessGroup(Operations, ProcessGroup):  # type: ignore[misc]  # names and their order are as torch calls them
    """One process group of torch.

    Calls from Python (``dist.all_reduce``) arrive directly. Calls from C++ (DDP's reducer, functional collectives) arrive through
    torch's trampoline, which finds methods by name and needs those for the group's name and description too.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(self, communicator: Communicator, on_close: Callable[[Communicator], None]) -> None:
        ProcessGroup.__init__(self, communicator.rank, communicator.size)  # type: ignore[call-arg]  # stub lacks this form
        self.communicator, self.on_close = communicator, on_close
        self._name = communicator.name
        self._description = "undefined"

    def __repr__(self) -> str:
        return f"<MpiProcessGroup over {self.communicator!r}>"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in devices()]

    def _get_backend(self, device: Any) -> MpiProcessGroup:  # type: ignore[override]
        """The group is its own backend, for every device."""
        return self

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description
