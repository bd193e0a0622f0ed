"""Remote calls over MPI: ``import mpicoll.rpc as rpc`` in the place of ``import torch.distributed.rpc as rpc``.

One call, from rpc_sync to its answer: api.py, agent.py, wire.py, ../mpi/mail.py, and back the same way. References: rref.py.
"""

from __future__ import annotations

from mpicoll.rpc import functions
from mpicoll.rpc.api import (
    BackendType,
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
    "BackendType",
    "MPIRpcBackendOptions",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "_set_rpc_timeout",
    "_wait_all",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


def is_available() -> bool:
    """True: MPI is all that it needs."""
    return True
