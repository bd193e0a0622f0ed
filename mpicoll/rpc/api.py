"""What a program calls: init_rpc, rpc_sync, rpc_async, remote, shutdown."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch.futures import Future

from mpicoll.autograd import contexts
from mpicoll.mpi import abort, runtime
from mpicoll.rpc import rref as references
from mpicoll.rpc.agent import Agent, connect
from mpicoll.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from mpicoll.rpc.drain import drain
from mpicoll.rpc.options import MPIRpcBackendOptions, RpcBackendOptions, TensorPipeRpcBackendOptions
from mpicoll.rpc.rref import RRef, seconds
from mpicoll.rpc.workers import WorkerInfo, check_name

To = str | int | WorkerInfo


class BackendType(Enum):
    """What carries the calls. TENSORPIPE is taken for MPI, so that programs that name it run."""

    MPI = "MPI"
    TENSORPIPE = "TENSORPIPE"


_futures = threading.local()


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker of this name; returns when every rank has called it (collective over MPI's ranks).

    Works with and without init_process_group. Calls run any function of any module on any worker: workers trust each other.

    Args:   name: unique among the workers; letters, digits, '_', ':' and '-'. rank, world_size: MPI knows; checked if given.
            backend: BackendType.MPI, .TENSORPIPE (the same) or None.
    Raises: RuntimeError: called twice, or two workers of one name (on every rank). ValueError: rank or world_size contradict
            MPI, or a name that is none. TypeError: options of another kind.
    """
    if references._agent is not None:
        raise RuntimeError("RPC is already initialized")
    check_name(name)
    if backend is not None and getattr(backend, "name", None) not in BackendType.__members__:
        raise TypeError(f"Argument backend must be a member of BackendType, got {backend!r}")
    there = runtime.start()
    for what, given, real in (("rank", rank, there.rank), ("world_size", world_size, there.size)):
        if given not in (None, -1, real):
            raise ValueError(f"init_rpc: {what}={given}, but MPI says {real}; leave it out, MPI knows")
    agent = Agent(name, _mine(rpc_backend_options))
    connect(agent)
    references.connect(agent)
    abort.install()
    agent.start()
    agent.mailbox.meet()  # nobody calls before everybody can answer
    atexit.register(_at_exit)


def _mine(options: Any) -> MPIRpcBackendOptions:
    if options is None:
        return TensorPipeRpcBackendOptions()
    if isinstance(options, MPIRpcBackendOptions):
        return options
    if isinstance(options, RpcBackendOptions) or hasattr(options, "rpc_timeout"):  # torch's own TensorPipeRpcBackendOptions
        return MPIRpcBackendOptions(
            num_worker_threads=getattr(options, "num_worker_threads", 16),
            rpc_timeout=options.rpc_timeout,
            device_maps=getattr(options, "device_maps", None),
        )
    raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Ends RPC here.

    Args:   graceful: wait until every worker has come here and all calls, those that they cause included, have ended everywhere
            (collective); False: leave now, and calls to this worker fail. timeout: seconds, for graceful; 0: no limit.
    Raises: RuntimeError: RPC was not initialised, or the time is up, with who had not come (RPC has ended here then, too).
    """
    agent = references.agent()
    try:
        graceful = graceful and drain(agent, timeout)
    except BaseException:
        graceful = False
        raise
    finally:
        _end(agent, graceful)


def _end(agent: Agent, graceful: bool) -> None:
    atexit.unregister(_at_exit)
    agent.stop(graceful)
    references.connect(None)
    contexts.clear()


def _at_exit() -> None:
    """A program that ends without shutdown: the others learn of it."""
    if references._agent is not None and not runtime.finalized():
        _end(references._agent, graceful=False)


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """The worker of this name; None: this one. Raises: RuntimeError: there is none."""
    agent = references.agent()
    return agent.me if worker_name is None else agent.workers.find(worker_name)


def get_rpc_timeout() -> float:
    """Seconds that a call may take where it names no timeout; 0: no limit."""
    return references.agent().timeout_s


def _set_rpc_timeout(timeout: float) -> None:
    references.agent().timeout_s = seconds(timeout) or 0.0


def rpc_sync(to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Calls ``func`` on a worker and returns its answer.

    Args:   to: name, rank or WorkerInfo. func: anything that can be pickled and called. args, kwargs: picklable; tensors of any
            dtype and strides travel as they lie. timeout: seconds; 0: no limit; -1: the agent's (60).
    Raises: what ``func`` raised, of its type, with the traceback from there; RuntimeError: no answer in time, or no such worker.
    """
    return _call(to, func, args, kwargs, timeout).wait()


def rpc_async(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]:
    """The same, and returns at once: a torch.futures.Future of the answer."""
    future = _call(to, func, args, kwargs, timeout)
    if (collected := getattr(_futures, "collected", None)) is not None:
        collected.append(future)
    return future


def remote(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[Any]:
    """The same, and the answer stays there: returns an RRef to it at once. What goes wrong is raised by its ``to_here``."""
    worker = _checked(to, func)
    return references.create(worker, func, args or (), kwargs or {}, timeout)


def _call(to: To, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> Future[Any]:
    worker = _checked(to, func)
    return references.agent().call(worker, func, args or (), kwargs, seconds(timeout))


def _checked(to: To, func: Callable[..., Any]) -> WorkerInfo:
    agent = references.agent()
    if not callable(func):
        raise TypeError("function should be callable.")
    return agent.workers.find(to)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At its end, waits for every rpc_async of this thread that was started in it."""
    _futures.collected = []
    try:
        yield
    finally:
        collected, _futures.collected = _futures.collected, None
        torch.futures.wait_all(collected)
