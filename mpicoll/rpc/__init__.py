"""Remote calls over MPI: ``import mpicoll.rpc as rpc`` instead of ``import torch.distributed.rpc as rpc``.

agent.py has the way of a call: by futures and transport, which uses wire (pickling) and ../_mpi/mailbox; service.py says which
thread receives. References: rref on the users' side, owner and owned_objects on the owner's side. The graceful end: drain.
"""
# ruff: noqa: F401  private names of torch's module, for programs that use them

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpicoll.rpc import api, constants, functions, options
from mpicoll.rpc.api import (
    BackendType,
    _delete_all_user_and_unforked_owner_rrefs,
    _get_current_rpc_agent,
    _get_debug_info,
    _is_current_rpc_agent_set,
    _rref_context_get_debug_info,
    _set_rpc_timeout,
    _wait_all,
    get_rpc_timeout,
    get_worker_info,
    init_rpc,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from mpicoll.rpc.options import MPIRpcBackendOptions, RpcBackendOptions, TensorPipeRpcBackendOptions
from mpicoll.rpc.rref import RRef
from mpicoll.rpc.workers import WorkerInfo

PyRRef = RRef

__all__ = [
    "BackendType", "MPIRpcBackendOptions", "PyRRef", "RRef", "RpcBackendOptions", "TensorPipeRpcBackendOptions",
    "WorkerInfo", "api", "constants", "functions", "get_rpc_timeout", "get_worker_info", "init_rpc", "is_available",
    "options", "remote", "rpc_async", "rpc_sync", "shutdown",
]  # fmt: skip


# Names of torch.distributed.rpc that are not here, and why.
LEFT_OUT = {
    **dict.fromkeys(("RpcAgent", "TensorPipeAgent"), "calls go through MPI, and no agent can be put in its place"),
    **dict.fromkeys(
        ("BackendValue", "backend_registered", "construct_rpc_backend_options", "init_backend", "register_backend"),
        "there is one backend; give rpc_backend_options to init_rpc",
    ),
    **dict.fromkeys(("AllGatherStates", "method_factory", "new_method"), "a part of torch's own machinery"),
    **dict.fromkeys(
        ("RemoteProfilerManager", "enable_gil_profiling", "_server_process_global_profile"),
        "torch.profiler on each rank shows what runs there",
    ),
}


def is_available() -> bool:
    """Returns True (not collective): MPI is all that it needs. It starts nothing.

    Example:
        >>> rpc.is_available()
        True
    """
    return True


if not TYPE_CHECKING:  # with this function, a name that is not there would be of type Any to a type checker

    def __getattr__(name: str) -> Any:
        reason = f": {LEFT_OUT[name]}" if name in LEFT_OUT else ""
        raise AttributeError(f"module 'mpicoll.rpc' has no attribute {name!r}{reason}")
