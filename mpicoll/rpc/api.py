"""The functions that a program calls: init_rpc, rpc_sync, rpc_async, remote, shutdown."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from mpicoll import autograd
from mpicoll._mpi import abort, runtime
from mpicoll.autograd import contexts
from mpicoll.errors import WorkerLeft
from mpicoll.rpc import current_agent, futures, gathering, inspection, rref
from mpicoll.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from mpicoll.rpc.drain import drain
from mpicoll.rpc.inspection import CurrentAgent
from mpicoll.rpc.options import RpcBackendOptions, checked_options, timeout_seconds
from mpicoll.rpc.owned_objects import id_text
from mpicoll.rpc.rref import RRef
from mpicoll.rpc.workers import WorkerInfo

if TYPE_CHECKING:
    from mpicoll.rpc.agent import Agent  # not at run time: it imports MPI, which starts it

_all_gather, _barrier = gathering.all_gather, gathering.barrier
_rref_context_get_debug_info = inspection.rref_debug_info

To = str | int | WorkerInfo


class BackendType(Enum):
    """Names of backends. TENSORPIPE means MPI, so that programs that name it run."""

    MPI = "MPI"
    TENSORPIPE = "TENSORPIPE"


_ignore_rref_leak = True  # False: a graceful shutdown raises if another worker still has references to objects of this one
_thread_local_var = threading.local()  # future_list: the futures that `_wait_all` waits for


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker of this name. Returns when every rank has called it (collective over all ranks of MPI).

    Works with and without init_process_group. A worker runs whatever function another one names: workers must trust each other.

    Args:
        name: Unique among the workers; letters, digits, '_', ':' and '-'.
        backend: BackendType.MPI, .TENSORPIPE (the same) or None.
        rank: Not needed; must be MPI's rank if given.
        world_size: Not needed; must be the number of MPI's ranks if given. 1 makes a world of this rank alone, in any job.
        rpc_backend_options: Threads, timeout and device maps; see MPIRpcBackendOptions.

    Raises:
        RuntimeError: Called twice, two workers with one name (on every rank), or an invalid name.
        LaunchError: Several workers are asked for, and no MPI launcher started this process. A RuntimeError.
        ValueError: rank or world_size contradict MPI.
        TypeError: Options of another kind.

    Example:
        >>> rpc.init_rpc(f"worker{rank}")  # on every rank
        >>> answer = rpc.rpc_sync("worker0", torch.add, (1, 2))  # doctest: +SKIP
        >>> rpc.shutdown()
    """
    if current_agent.find() is not None:
        raise RuntimeError("RPC is already initialized")
    if not isinstance(name, str):
        raise TypeError(f"init_rpc: name must be a str, got {type(name).__name__}")
    WorkerInfo(name, 0)  # raises if the name is invalid
    if backend is not None and getattr(backend, "name", None) not in BackendType.__members__:
        raise TypeError(f"Argument backend must be a member of BackendType, got {backend!r}")
    options = checked_options(rpc_backend_options, backend)
    ranks = _runtime(rank, world_size)
    from mpicoll.rpc.agent import Agent

    agent = Agent(ranks, name, options)
    current_agent.set_to(agent)
    abort.install()
    futures.install()
    gathering.begin()
    agent.start()
    agent.mailbox.meet()  # no worker calls before all can answer
    atexit.register(_at_exit)


def _runtime(rank: int, world_size: int | None) -> runtime.Runtime:
    """Returns all of MPI's ranks, or this one alone.

    Raises:
        LaunchError: Several workers are asked for, and no MPI launcher started this process.
        ValueError: rank or world_size contradict MPI.
    """
    if world_size == 1 and rank in (0, -1):
        return runtime.alone()
    ranks = runtime.everyone()
    if world_size is not None and world_size > 1:
        runtime.check_size(world_size, f"init_rpc: world_size={world_size}")
    elif rank > 0:
        runtime.check_size(rank + 1, f"init_rpc: rank={rank}")
    for what, given, real in (("rank", rank, ranks.rank), ("world_size", world_size, ranks.size)):
        if given not in (None, -1, real):
            raise ValueError(f"init_rpc: {what}={given}, but MPI says {real}; leave it out, MPI knows")
    return ranks


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Ends RPC on this worker, even if it raises.

    Args:
        graceful: Wait until every worker has called this and all calls have finished everywhere, including those that they cause
            (collective). False: leave now; calls to this worker fail.
        timeout: Seconds to wait if graceful; 0: no limit.

    Raises:
        RuntimeError: RPC was not initialised; the timeout has passed, with the names of the workers that have not come; or a
            leak, see _ignore_rref_leak.

    Example:
        >>> rpc.shutdown(timeout=60)  # on every worker
    """
    agent = current_agent.get()
    if not graceful:
        _end(agent, graceful=False)
        return
    complete = False
    try:
        all_came = _wait_all_workers(timeout)
        _delete_all_user_and_unforked_owner_rrefs()
        complete = all_came and drain(agent, timeout)
        _check_leaks()
    finally:
        _end(agent, complete)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> bool:
    """Returns when every worker has called this and no call is pending (collective). False: some worker has left before.

    Raises:
        RuntimeError: ``timeout`` seconds have passed (0: no limit). Names the workers that have not come.
    """
    return drain(current_agent.get(), timeout)


def _delete_all_user_and_unforked_owner_rrefs(timeout_millis: int = 0) -> None:
    """Ends all references to objects on other workers: using one raises. ``timeout_millis`` is not used."""
    rref.delete_users(current_agent.get())


def _check_leaks() -> None:
    """Raises RuntimeError if another worker still has references to objects of this one and _ignore_rref_leak is False."""
    if _ignore_rref_leak:
        return
    leaks = [f"Leaking RRef {id_text(entry.id)}" for entry in current_agent.get().objects.all() if entry.outside != 0]
    if leaks:
        raise RuntimeError("\n".join(["shutdown: other workers still refer to objects of this one", *leaks]))


def _end(agent: Agent, graceful: bool) -> None:
    atexit.unregister(_at_exit)
    agent.stop(graceful)
    current_agent.set_to(None)
    contexts.registry.clear()


def _at_exit() -> None:
    """Tells the other workers that this program ends without shutdown."""
    agent = current_agent.find()
    if agent is not None and not runtime.finalized():
        _end(agent, graceful=False)


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Returns the worker of this name or rank; None: this worker.

    Raises:
        RuntimeError: There is no such worker, or RPC is not initialised.

    Example:
        >>> rpc.get_worker_info("worker1").id  # doctest: +SKIP
        1
    """
    agent = current_agent.get()
    return agent.me if worker_name is None else agent.workers.find(worker_name)


def get_rpc_timeout() -> float:
    """Returns the seconds that a call may take if it names no timeout; 0: no limit.

    Raises:
        RuntimeError: RPC is not initialised.
    """
    return current_agent.get().timeout_s


def _set_rpc_timeout(timeout: float) -> None:
    current_agent.get().timeout_s = timeout_seconds(timeout) or 0.0


def rpc_sync(to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Calls ``func`` on a worker and returns its result.

    Args:
        to: Name, rank or WorkerInfo of the worker.
        func: A callable that can be pickled: a function of a module that the worker can import, for example.
        args: Positional arguments; anything that can be pickled. Tensors of any dtype and strides keep them.
        kwargs: Keyword arguments.
        timeout: Seconds; 0: no limit; -1: the agent's, see `get_rpc_timeout`.

    Raises:
        RuntimeError: No answer in time, no such worker, or RPC is not initialised.
        WorkerLeft: The worker has left. A RuntimeError.
        Exception: What ``func`` raised, with its type; the text has the traceback of the worker.

    Example:
        >>> rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))  # doctest: +SKIP
        tensor([2., 2.])
    """
    return _call(to, func, args, kwargs, timeout).wait()


def rpc_async(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]:
    """Calls ``func`` on a worker and returns a future of its result at once.

    Args:
        to, func, args, kwargs, timeout: As for `rpc_sync`.

    Returns:
        A torch.futures.Future. Its ``wait`` raises what `rpc_sync` raises, WorkerLeft included.

    Raises:
        RuntimeError: No such worker, or RPC is not initialised.
        Exception: Whatever pickling raises.

    Example:
        >>> futures = [rpc.rpc_async(worker, torch.rand, (2,)) for worker in ("worker1", "worker2")]
        >>> parts = torch.futures.wait_all(futures)  # doctest: +SKIP
    """
    try:
        future = _call(to, func, args, kwargs, timeout)
    except WorkerLeft as error:
        future = current_agent.get().failed(error)
    if (collected := getattr(_thread_local_var, "future_list", None)) is not None:
        collected.append(future)
    return future


def remote(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[Any]:
    """Calls ``func`` on a worker, which keeps the result. Returns an RRef to the result at once.

    Args:
        to, func, args, kwargs: As for `rpc_sync`.
        timeout: Seconds until the RRef fails; 0: no limit; -1: the agent's.

    Returns:
        An RRef. Its ``to_here`` raises what ``func`` raised.

    Raises:
        RuntimeError: No such worker, or RPC is not initialised.
        WorkerLeft: The worker has left. A RuntimeError.

    Example:
        >>> weight = rpc.remote("worker1", torch.rand, (1000, 1000))
        >>> weight.rpc_sync().sum()  # runs on worker1  # doctest: +SKIP
    """
    worker = _checked(to, func)
    return rref.create(worker, func, args or (), kwargs or {}, timeout)


def _call(to: To, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> Future[Any]:
    worker = _checked(to, func)
    return current_agent.get().call(worker, func, args or (), kwargs, timeout_seconds(timeout))


def _checked(to: To, func: Callable[..., Any]) -> WorkerInfo:
    agent = current_agent.get()
    if not callable(func):
        raise TypeError("function should be callable.")
    return agent.workers.find(to)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Waits at the end of the ``with`` block for every rpc_async that this thread has started in it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


def _is_current_rpc_agent_set() -> bool:
    """Returns whether init_rpc has been called, and shutdown has not."""
    return current_agent.find() is not None


def _get_current_rpc_agent() -> CurrentAgent:
    """Returns the agent of this worker, for questions about workers. Raises RuntimeError if RPC is not initialised."""
    return CurrentAgent(current_agent.get_for_rref())


def _get_debug_info() -> dict[str, str]:
    """Returns numbers of references, pending calls and autograd contexts. Raises RuntimeError if RPC is not initialised."""
    agent = CurrentAgent(current_agent.get())
    return _rref_context_get_debug_info() | agent.get_debug_info() | autograd._get_debug_info()
