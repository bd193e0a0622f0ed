"""How an agent behaves: torch's keywords, and what they mean over MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from mpicoll.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT

Device = torch.device | str | int
DeviceMap = dict[torch.device, torch.device]


def _device(device: Device) -> torch.device:
    """A number is a CUDA device's, in a build of torch without CUDA, too."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


class RpcBackendOptions:
    """Options that every backend has (not collective).

    Args:
        rpc_timeout: Seconds until a call fails; 0: never.
        init_method: Accepted and ignored: MPI knows where the workers are.

    Raises:
        TypeError: ``rpc_timeout`` is a timedelta.
        ValueError: ``rpc_timeout`` is negative.

    Example:
        >>> rpc.RpcBackendOptions(rpc_timeout=5).rpc_timeout
        5.0
    """

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        if isinstance(rpc_timeout, timedelta):
            raise TypeError(f"rpc_timeout must be a number of seconds, got {rpc_timeout!r}; use its total_seconds()")
        if not rpc_timeout >= 0:
            raise ValueError(f"RPC Timeout must be non-negative: rpc_timeout is 0 (no limit) or more seconds, got {rpc_timeout}")
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method


class MPIRpcBackendOptions(RpcBackendOptions):
    """Options of RPC over MPI, for `init_rpc` (not collective).

    Args:
        num_worker_threads: Idle threads that are kept for calls; beyond that, as many are made as are needed.
        rpc_timeout: Seconds until a call fails; 0: never.
        init_method: Accepted and ignored: MPI knows where the workers are.
        device_maps: For each worker that CUDA tensors go to: which device of this worker becomes which device there. Answers go
            by the same map in reverse.
        devices: Accepted and ignored.
        unused: TensorPipe's private options, accepted and ignored.

    Raises:
        TypeError: There is no such option.
        ValueError: ``num_worker_threads`` is below 1, ``rpc_timeout`` is negative, or two devices would become one.

    Example:
        >>> rpc.MPIRpcBackendOptions(num_worker_threads=8, rpc_timeout=30).num_worker_threads
        8
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
        init_method: str = DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[Device, Device]] | None = None,
        devices: Sequence[Device] | None = None,
        **unused: Any,
    ) -> None:
        unknown = set(unused) - {"_transports", "_channels"}  # TensorPipe's
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(unknown))}")
        if num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be positive, got {num_worker_threads}")
        super().__init__(rpc_timeout, init_method)
        self.num_worker_threads = num_worker_threads
        self.device_maps: dict[str, DeviceMap] = {}
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)
        self.set_devices(devices or ())

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Adds to the device map for a worker.

        Args:
            to: Name of the worker.
            device_map: Devices of this worker, and what each becomes there.

        Raises:
            ValueError: Two devices would become one.
        """
        known = self.device_maps.setdefault(to, {})
        known.update({_device(mine): _device(theirs) for mine, theirs in device_map.items()})
        if len(set(known.values())) < len(known):
            raise ValueError(f"`device_map` only supports 1-to-1 mapping, got {known} for worker {to!r}")

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Keeps the list in ``devices``, which mpicoll does not use.

        Args:
            devices: Any devices.
        """
        self.devices = [_device(device) for device in devices]


TensorPipeRpcBackendOptions = MPIRpcBackendOptions  # for programs that name TensorPipe, which has no part in it


def timeout_seconds(timeout: float) -> float | None:
    """Returns the seconds, or None for -1: the agent's. Raises ValueError for other negative numbers."""
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 (no limit) or more seconds, got {timeout}")
    return timeout


class DeviceMaps:
    """Which device of a worker, ``me``, becomes which device of another worker.

    A call goes by the caller's map. What answers it goes by the same map the other way round, as torch has it, so that a caller
    alone can say what belongs together; gradients go by either.

    Args:   everybody: each worker's maps, by its name, by the name of the worker that they are for.
    Raises: ValueError, on all workers alike: a map is for a worker that there is not.
    """

    def __init__(self, me: str, everybody: Mapping[str, Mapping[str, DeviceMap]]) -> None:
        for name, maps in everybody.items():
            if unknown := sorted(set(maps) - set(everybody)):
                workers = ", ".join(map(repr, everybody))
                raise ValueError(
                    f"Node {name} has invalid target node names in its device maps: {unknown[0]!r}; the workers are {workers}"
                )
        mine = everybody[me]
        theirs = {name: {there: here for here, there in maps.get(me, {}).items()} for name, maps in everybody.items()}
        self._calls = {name: {**theirs[name], **mine.get(name, {})} for name in everybody}
        self._answers = {name: {**mine.get(name, {}), **theirs[name]} for name in everybody}

    def to(self, name: str, answer: bool) -> DeviceMap:
        """For what goes to a worker."""
        return (self._answers if answer else self._calls)[name]
