"""Options of init_rpc, with torch's keywords, and timeouts of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from mpicoll.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_NUM_WORKER_THREADS, DEFAULT_RPC_TIMEOUT_SEC, UNSET_RPC_TIMEOUT

Device = torch.device | str | int


def _device(device: Device) -> torch.device:
    """Returns the device. A number means a CUDA device, even if this build of torch has no CUDA."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


class RpcBackendOptions:
    """Options that every backend has.

    Args:
        rpc_timeout: Seconds until a call fails; 0: never.
        init_method: Not used, because MPI knows where the workers are.

    Raises:
        ValueError: The timeout is negative.
        TypeError: The timeout is a timedelta.
    """

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        if isinstance(rpc_timeout, timedelta):
            raise TypeError(f"rpc_timeout must be a number of seconds, got {rpc_timeout!r}; use its total_seconds()")
        if not rpc_timeout >= 0:
            raise ValueError(f"RPC Timeout must be non-negative: rpc_timeout is 0 (no limit) or more seconds, got {rpc_timeout}")
        self.rpc_timeout = float(rpc_timeout)
        self.init_method = init_method


class MPIRpcBackendOptions(RpcBackendOptions):
    """Options of RPC over MPI.

    Args:
        num_worker_threads: Number of idle threads to keep. More are made whenever more calls run at the same time.
        rpc_timeout: Seconds until a call fails; 0: never.
        init_method: Not used, because MPI knows where the workers are.
        device_maps: For each worker that receives CUDA tensors, the device there for each device of this worker. Answers use the
            same map backwards.
        devices: Accepted because torch has it, and not used.

    Raises:
        ValueError: num_worker_threads or the timeout is out of range, or a map is not one-to-one.
        TypeError: There is no such option.

    Example:
        >>> rpc.init_rpc("worker0", rpc_backend_options=rpc.MPIRpcBackendOptions(rpc_timeout=300))  # doctest: +SKIP
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
        self.device_maps: dict[str, dict[torch.device, torch.device]] = {}
        for worker, device_map in (device_maps or {}).items():
            self.set_device_map(worker, device_map)
        self.devices = [_device(device) for device in devices or ()]

    def set_device_map(self, to: str, device_map: Mapping[Device, Device]) -> None:
        """Adds to the map for the worker ``to``.

        Raises:
            ValueError: Two devices would map to one.
        """
        known = self.device_maps.setdefault(to, {})
        known.update({_device(source): _device(target) for source, target in device_map.items()})
        if len(set(known.values())) < len(known):
            raise ValueError(f"`device_map` only supports 1-to-1 mapping, got {known} for worker {to!r}")

    def set_devices(self, devices: Sequence[Device]) -> None:
        self.devices = [_device(device) for device in devices]


class TensorPipeRpcBackendOptions(MPIRpcBackendOptions):
    """MPIRpcBackendOptions under the name that programs for TensorPipe use."""


def timeout_seconds(timeout: float) -> float | None:
    """Returns the timeout of a call in seconds. None: the agent's, for which programs write -1.

    Raises:
        ValueError: Another negative number.
    """
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 (no limit) or more seconds, got {timeout}")
    return timeout


def checked_options(options: Any, backend: Any) -> MPIRpcBackendOptions:
    """Returns the options that init_rpc was given, or the default ones. Converts torch's TensorPipeRpcBackendOptions.

    Raises:
        TypeError: Options of another kind.
    """
    if options is None:
        return TensorPipeRpcBackendOptions()
    if isinstance(options, MPIRpcBackendOptions):
        return options
    is_tensorpipe = hasattr(options, "num_worker_threads")  # torch's TensorPipeRpcBackendOptions
    if not is_tensorpipe and not isinstance(options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if not is_tensorpipe and backend is None:
        raise TypeError(f"Could not infer backend for options {options}; use MPIRpcBackendOptions")
    if not is_tensorpipe:
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions` or MPIRpcBackendOptions, got {options}")
    return MPIRpcBackendOptions(
        num_worker_threads=getattr(options, "num_worker_threads", DEFAULT_NUM_WORKER_THREADS),
        rpc_timeout=options.rpc_timeout,
        device_maps=getattr(options, "device_maps", None),
    )
