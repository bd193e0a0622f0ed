"""``"cpu:mpi,cuda:nccl"`` on torch <= 2.13: one group with a backend for each kind of device.

A backend written in Python is the whole group on these versions. So ours passes on the operations of the other backends:

    dist.all_reduce(tensor) ──► MixedProcessGroup.allreduce ──┬─► cpu   ours: the engine
                                                              └─► cuda  a ProcessGroup of torch, with NCCL alone

The first tensor of an operation decides. Without tensors (barrier) its options decide, or else it goes to MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

from mpicoll._c10d.names import OURS, WORK_METHODS
from mpicoll._c10d.torch213.process_group import MpiProcessGroup

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

BY_DEVICE = (*WORK_METHODS, "start_coalescing", "end_coalescing", "_start_coalescing")


def parts(translated: str) -> dict[str, str] | None:
    """Splits a string such as "cpu:mpicoll,cuda:nccl" into the backend of each kind of device; None if it names one backend.

    Raises:
        ValueError: A backend has no device, or a device is named twice.
    """
    pairs = [tuple(word.strip() for word in part.rpartition(":")[::2]) for part in translated.split(",")]
    if len({backend for _, backend in pairs}) < 2:
        return None
    devices = [device for device, _ in pairs]
    if "" in devices or len(set(devices)) < len(devices):
        raise ValueError(f"backend {translated!r}: several backends need one device each, as in 'cpu:mpi,cuda:nccl'")
    return dict(pairs)  # type: ignore[arg-type]


class MixedProcessGroup(MpiProcessGroup):
    """One process group of torch with several backends: ``devices`` is that of `parts`.

    Raises:
        RuntimeError: torch was built without one of the backends, or the backend raises, such as NCCL without a GPU.
    """

    def __init__(
        self, communicator: Communicator, on_close: Callable[[Communicator], None], devices: dict[str, str], options: Any
    ) -> None:
        super().__init__(communicator, on_close)
        self._devices = list(devices)
        self._others = {device: _other(name, device, options) for device, name in devices.items() if name != OURS}

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._devices]

    def _get_backend(self, device: Any) -> Any:
        other = self._others.get(torch.device(device).type)
        return self if other is None else other._get_backend(torch.device(device))

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        for device, other in self._others.items():
            other._get_backend(torch.device(device))._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        for other in self._others.values():
            other.shutdown()
        super().shutdown()

    def abort(self) -> None:
        for other in self._others.values():
            other.abort()
        super().abort()


def _by_device(name: str) -> Callable[..., Any]:
    ours = getattr(MpiProcessGroup, name)

    def method(self: MixedProcessGroup, *arguments: Any, **named: Any) -> Any:
        other = self._others.get(_device_of([*arguments, *named.values()]) or "")
        return ours(self, *arguments, **named) if other is None else getattr(other, name)(*arguments, **named)

    method.__name__ = name
    return method


for _name in BY_DEVICE:
    setattr(MixedProcessGroup, _name, _by_device(_name))


def _device_of(items: Iterable[Any]) -> str | None:
    """The kind of device of the first tensor in nested lists, or of a device that the options or the caller name."""
    for item in items:
        if isinstance(item, Tensor):
            return item.device.type
        if isinstance(item, torch.device):
            return item.type
        if isinstance(item, (list, tuple)):
            found = _device_of(item)
        else:
            device = getattr(item, "device", None)
            found = device.type if isinstance(device, torch.device) else None
        if found is not None:
            return found
    return None


def _other(name: str, device: str, options: Any) -> ProcessGroup:
    """Makes a group of torch with one of its own backends, for the same ranks and over the same store."""
    store = PrefixStore(f"{device}/{name}/", options.store)
    backend: Any
    if name == "gloo":
        backend = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
        kind = ProcessGroup.BackendType.GLOO
    elif name == "nccl":
        if not dist.is_nccl_available():
            raise RuntimeError("Distributed package doesn't have NCCL built in")
        choices = dist.ProcessGroupNCCL.Options()
        choices._timeout = options.timeout
        choices.global_ranks_in_group = list(options.global_ranks_in_group)
        choices.group_name = options.group_id
        backend = dist.ProcessGroupNCCL(store, options.group_rank, options.group_size, choices)
        kind = ProcessGroup.BackendType.NCCL
    else:
        raise RuntimeError(
            f"{device}:{name}: torch {torch.__version__} mixes mpi with gloo and nccl only; torch >= 2.14 with all"
        )
    backend._set_sequence_number_for_group()
    group = ProcessGroup(store, options.group_rank, options.group_size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    group._set_group_name(f"{options.group_id}/{name}")  # type: ignore[arg-type]  # a NewType of str, on some versions
    return group
