"""What a program calls: init_rpc, rpc_sync, rpc_async, remote, shutdown."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch.futures import Future

from mpicoll import autograd
from mpicoll._base import config
from mpicoll._faults.watch import end_job_after, watch
from mpicoll._mpi import abort, runtime
from mpicoll.autograd import contexts
from mpicoll.rpc import futures, rref
from mpicoll.rpc.agent import NOT_SET, Agent
from mpicoll.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC, DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from mpicoll.rpc.drain import drain
from mpicoll.rpc.options import MPIRpcBackendOptions, RpcBackendOptions, timeout_seconds
from mpicoll.rpc.owned_objects import id_text
from mpicoll.rpc.rref import RRef
from mpicoll.rpc.workers import WorkerInfo

logger = logging.getLogger(__name__)

To = str | int | WorkerInfo


class BackendType(Enum):
    """What carries the calls, for `init_rpc` (not collective). TENSORPIPE is taken for MPI, so that programs that name it run.

    Example:
        >>> rpc.BackendType.MPI.name
        'MPI'
    """

    MPI = "MPI"
    TENSORPIPE = "TENSORPIPE"


_ignore_rref_leak = True  # False: a graceful shutdown raises where another worker still has references to objects of this one
_thread_local_var = threading.local()  # future_list: what `_wait_all` waits for


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Makes this process a worker of this name; returns when every rank has called it (collective over MPI's ranks).

    Works with and without init_process_group. Unlike torch's, it needs neither rank, world_size nor MASTER_ADDR. Calls run any
    function of any module on any worker: workers trust each other.

    Args:
        name: Unique among the workers; letters, digits, '_', ':' and '-'.
        backend: BackendType.MPI, .TENSORPIPE (the same) or None.
        rank: MPI knows; checked if given.
        world_size: MPI knows; checked if given. 1 makes a world of this rank alone; in a job of several, MPI has to run already.
        rpc_backend_options: Their ``rpc_timeout`` is also the limit of this call; without options it is MPICOLL_TIMEOUT, or 60 s.

    Raises:
        OperationTimeout: A rank did not come within the limit; names it. If all have come and one then stops, the job ends.
        RuntimeError: Called twice, two workers of one name (on every rank), or a name that is none.
        ValueError: rank or world_size contradict MPI.
        LaunchError: world_size does, and MPI has not started; or several workers are asked for, and no launcher has started them.
        TypeError: Options of another kind.
        CommunicationError: MPI has no communicator left.

    Example:
        >>> rpc.init_rpc(f"worker{dist.get_rank()}")
        >>> rpc.get_worker_info("worker1").id
        1
        >>> rpc.shutdown()
    """
    if Agent.current is not None:
        raise RuntimeError("RPC is already initialized")
    if not isinstance(name, str):
        raise TypeError(f"init_rpc: name must be a str, got {type(name).__name__}")
    WorkerInfo(name, 0)  # refuses what is no name
    if backend is not None and getattr(backend, "name", None) not in BackendType.__members__:
        raise TypeError(f"Argument backend must be a member of BackendType, got {backend!r}")
    options = _mine(rpc_backend_options, backend)
    # As in torch, the timeout of calls is the limit of this call, too.
    limit_s: float = options.rpc_timeout or math.inf
    if rpc_backend_options is None:
        limit_s = config.get("MPICOLL_TIMEOUT") or DEFAULT_RPC_TIMEOUT_SEC
    with end_job_after("init_rpc", limit_s):
        ranks = _runtime(rank, world_size)
        from mpicoll._faults import roll_call  # these start MPI
        from mpicoll._mpi.mailbox import Mailbox

        abort.install()
        roll_call.everyone(ranks, "init_rpc", limit_s)
        agent = Agent.current = Agent(ranks, Mailbox(ranks), name, options)
        futures.install()
        agent.start()
        agent.mailbox.meet()  # nobody calls before everybody can answer
    atexit.register(_at_exit)


def _runtime(rank: int, world_size: int | None) -> runtime.Runtime:
    """Returns all of MPI's ranks, or this one alone."""
    runtime.refuse_other_size("init_rpc", world_size, 'For a world of one, call init_process_group("mpi") on all ranks before')
    if world_size == 1 and rank in (0, -1):
        return runtime.alone()
    ranks = runtime.start()
    runtime.check_named("init_rpc", rank, world_size)
    for what, given, real in (("rank", rank, ranks.rank), ("world_size", world_size, ranks.size)):
        if given not in (None, -1, real):
            raise ValueError(f"init_rpc: {what}={given}, but MPI says {real}; leave it out, MPI knows")
    return ranks


def _mine(options: Any, backend: Any) -> MPIRpcBackendOptions:
    if options is None:
        return MPIRpcBackendOptions()
    if isinstance(options, MPIRpcBackendOptions):
        return options
    if hasattr(options, "num_worker_threads"):  # torch's own TensorPipeRpcBackendOptions
        return MPIRpcBackendOptions(
            num_worker_threads=options.num_worker_threads, rpc_timeout=options.rpc_timeout, device_maps=options.device_maps
        )
    if not isinstance(options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None:
        raise TypeError(f"Could not infer backend for options {options}; use MPIRpcBackendOptions")
    raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions` or MPIRpcBackendOptions, got {options}")


def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Ends RPC on this worker (collective if ``graceful``).

    Args:
        graceful: Wait until every worker has called this, and all calls, with the calls that they cause, have ended everywhere.
            False: leave now; calls to this worker fail.
        timeout: Limit in seconds if ``graceful``; 0: no limit.

    Raises:
        RuntimeError: RPC is not initialised. Or the time is up: the message names the missing workers, and RPC has ended here.

    Example:
        >>> rpc.init_rpc(f"worker{dist.get_rank()}")
        >>> rpc.shutdown()
    """
    agent = Agent.get()
    if not graceful:
        _end(agent, graceful=False)
        return
    complete = False
    try:
        everybody = _wait_all_workers(timeout)
        _delete_all_user_and_unforked_owner_rrefs()
        complete = everybody and drain(agent, timeout)
        _check_leaks()
    finally:
        _end(agent, complete)


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> bool:
    """Returns when every worker is here and no call is under way (collective); False: some worker has left before.

    Raises: RuntimeError: ``timeout`` seconds are over (0: no limit), with who had not come.
    """
    return drain(Agent.get(), timeout)


def _delete_all_user_and_unforked_owner_rrefs(timeout_millis: int = 0) -> None:
    """Ends all references here to objects on other workers; they raise when they are used. ``timeout_millis``: not needed."""
    for reference in Agent.get().live_users():
        reference._delete()


def _check_leaks() -> None:
    """Raises: RuntimeError: another worker still has references to objects of this one, and _ignore_rref_leak is False."""
    if _ignore_rref_leak:
        return
    leaks = [f"Leaking RRef {id_text(entry.id)}" for entry in Agent.get().objects.all() if entry.outside]
    if leaks:
        raise RuntimeError("\n".join(["shutdown: other workers still refer to objects of this one", *leaks]))


def _end(agent: Agent, graceful: bool) -> None:
    atexit.unregister(_at_exit)
    agent.stop(graceful)
    watch.stop()
    Agent.current = None
    contexts.registry.clear()


def _at_exit() -> None:
    """A program that ends without shutdown: the others learn of it."""
    agent = Agent.current
    if agent is not None and not runtime.in_forked_child() and not runtime.finalized():
        _end(agent, graceful=False)


def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Returns the worker of a name, or this worker (not collective).

    Args:
        worker_name: Name or rank; None: this worker.

    Returns:
        Its WorkerInfo, with ``name`` and ``id`` (the rank).

    Raises:
        RuntimeError: There is no such worker, or RPC is not initialised.

    Example:
        >>> rpc.get_worker_info("worker1")
        WorkerInfo(id=1, name=worker1)
    """
    return Agent.get().get_worker_info(worker_name)


def get_rpc_timeout() -> float:
    """Returns the seconds that a call may take if it names no timeout; 0: no limit (not collective).

    Raises:
        RuntimeError: RPC is not initialised.

    Example:
        >>> rpc.get_rpc_timeout()
        60.0
    """
    return Agent.get().timeout_s


def _set_rpc_timeout(timeout: float) -> None:
    Agent.get().timeout_s = timeout_seconds(timeout) or 0.0


def rpc_sync(to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
    """Calls ``func`` on a worker and returns its answer, for which it waits (not collective).

    Args:
        to: Name, rank or WorkerInfo; this worker, too.
        func: Any callable that can be pickled: a function of a module, or of the script if the worker runs the same.
        args: Positional arguments, picklable. Tensors may have any dtype and strides.
        kwargs: Keyword arguments, picklable.
        timeout: Seconds; 0: no limit; -1: that of `get_rpc_timeout`.

    Returns:
        What ``func`` returns.

    Raises:
        Exception: What ``func`` raised, with its type, and the traceback from there.
        RuntimeError: No answer in time; the message names the function, the worker and the state of its process. Or there is no
            such worker.
        WorkerLeft: The worker has ended.
        TypeError: ``func`` is not callable, or something does not pickle.

    Example:
        >>> rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
        tensor([2., 2.])
    """
    return _call(to, func, args, kwargs, timeout).wait()


def rpc_async(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]:
    """Calls ``func`` on a worker and returns a future of its answer at once (not collective).

    Args:
        to: Name, rank or WorkerInfo; this worker, too.
        func: As for `rpc_sync`.
        args: As for `rpc_sync`. Do not change tensors before the answer is here.
        kwargs: As for `rpc_sync`.
        timeout: Seconds; 0: no limit; -1: that of `get_rpc_timeout`.

    Returns:
        A torch.futures.Future. Its ``wait()`` returns the answer, or raises as `rpc_sync` does (WorkerLeft, too).

    Raises:
        RuntimeError: There is no such worker.
        TypeError: ``func`` is not callable, or something does not pickle.

    Example:
        >>> futures = [rpc.rpc_async("worker1", torch.add, args=(torch.ones(1), number)) for number in range(3)]
        >>> torch.futures.wait_all(futures)
        [tensor([1.]), tensor([2.]), tensor([3.])]
    """
    future = _call(to, func, args, kwargs, timeout)
    if (collected := getattr(_thread_local_var, "future_list", None)) is not None:
        collected.append(future)
    return future


def remote(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[Any]:
    """Calls ``func`` on a worker, where the answer stays, and returns an RRef to it at once (not collective).

    Args:
        to: Name, rank or WorkerInfo; this worker, too.
        func: As for `rpc_sync`; often a class.
        args: As for `rpc_sync`.
        kwargs: As for `rpc_sync`.
        timeout: Seconds; 0: no limit; -1: that of `get_rpc_timeout`.

    Returns:
        An RRef. Its ``to_here()`` raises what ``func`` raised.

    Raises:
        RuntimeError: There is no such worker.
        TypeError: ``func`` is not callable, or something does not pickle.
        WorkerLeft: The worker has ended.

    Example:
        >>> rref = rpc.remote("worker1", torch.full, args=((2,), 3.0))
        >>> rref.owner_name(), rref.to_here().tolist()
        ('worker1', [3.0, 3.0])
    """
    worker = _checked(to, func)
    return rref.create(worker, func, args or (), kwargs or {}, timeout)


def _call(to: To, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float) -> Future[Any]:
    worker = _checked(to, func)
    return Agent.get().call(worker, func, args or (), kwargs, timeout_seconds(timeout))


def _checked(to: To, func: Callable[..., Any]) -> WorkerInfo:
    agent = Agent.get()
    if not callable(func):
        raise TypeError("function should be callable.")
    return agent.workers.find(to)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At its end, waits for every rpc_async of this thread that was started in it."""
    started = _thread_local_var.future_list = []
    try:
        yield
    finally:
        del _thread_local_var.future_list
        torch.futures.wait_all(started)


# -- what libraries ask ------------------------------------------------------------------------------------------------


def _is_current_rpc_agent_set() -> bool:
    return Agent.current is not None


def _get_current_rpc_agent() -> Agent:
    """This worker's agent, to be asked who takes part. Raises: RuntimeError: there is none."""
    return Agent.get(NOT_SET)


def _rref_context_get_debug_info() -> dict[str, str]:
    """The number of references on this worker, by state. Raises: RuntimeError: RPC is not initialised."""
    agent = Agent.get()
    owned = agent.objects.all()
    return {
        "num_owner_rrefs": str(len(owned)),
        "num_forks": str(sum(bool(entry.outside) for entry in owned)),
        "num_pending_users": str(sum(not reference.confirmed_by_owner() for reference in agent.live_users())),
        "num_pending_children": "0",  # weighted counting: no reference waits for the arrival of a copy
        "num_pending_futures": str(agent.counts()[2]),
    }


def _get_debug_info() -> dict[str, str]:
    """Numbers about references, calls under way and autograd contexts. Raises: RuntimeError: RPC is not initialised."""
    return _rref_context_get_debug_info() | Agent.get().get_debug_info() | autograd._get_debug_info()
