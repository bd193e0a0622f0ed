"""Shared by all collectives: the choice of the backend, and the copy back from packed memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from mpicoll._engine.group import Group
from mpicoll._host.collectives import HostCollectives
from mpicoll._tensors import checks
from mpicoll._tensors.calls import Call

# Loaded with the first group of a world with a GPU: without it, imports take a fifth less CPU time.
if TYPE_CHECKING:
    from mpicoll._algorithms.backend import Backend
    from mpicoll._device.collectives import DeviceCollectives

F = TypeVar("F", bound=Callable[..., Any])
REFUSALS = TypeError, ValueError  # what a collective raises before it communicates; a program may catch it and go on


@dataclass(eq=False, repr=False, kw_only=True)
class Collectives(Group):
    """A group with a backend for each kind of device."""

    host: HostCollectives
    devices: DeviceCollectives | None  # None: no rank had a device when the group was made

    def backend(self, operation: str, *memories: Tensor) -> Backend:
        """Returns the backend for the kind of device on which the memories are.

        Raises:
            ValueError: The memories are on different kinds of device, or no rank had such a device when the group was made.
            RuntimeError: The stream of a device is being captured into a CUDA graph.
        """
        for memory in memories:
            if not memory.is_cpu:
                break
        else:
            return self.host
        device = checks.one_kind_of_device(operation, memories)
        if self.devices is None:
            raise ValueError(
                f"{operation}: no rank saw a device like {device} when the group was made, so that it has no way there"
            )
        self.devices.check(operation, device)
        return self.devices


def copying_back(backend: Backend, call: Call, tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> Call:
    """Returns ``call``, or a Call that then copies the packed copies among ``memories`` into their ``tensors``."""
    for tensor, memory in zip(tensors, memories, strict=True):
        if memory is not tensor:
            return backend.copying_back(call, tensors, memories)
    return call


def refusing(method: F) -> F:
    """Gives a call with wrong arguments its place: Note [A refusal is a call]. The fastest collectives do so themselves."""

    @functools.wraps(method)
    def wrapped(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except REFUSALS as error:
            self.refused(method.__name__, error)
            raise

    return wrapped  # type: ignore[return-value]
