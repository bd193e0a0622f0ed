"""init_process_group, split_group, reconfigure, shrink and shrink_group; and the engine's communicator of each group."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.compiler import is_dynamo_compiling
from torch.distributed import GroupMember, ProcessGroup, distributed_c10d
from torch.nn import Parameter

import mpicoll
from mpicoll._base.errors import LaunchError
from mpicoll._c10d import dynamo, hooks, register, torch_world
from mpicoll._c10d.hooks import found as _found
from mpicoll._c10d.torch_world import world as _world
from mpicoll._mpi import runtime
from mpicoll._tensors import checks

if TYPE_CHECKING:  # the engine starts MPI, which belongs to init_process_group, not to `from mpicoll import all_reduce`
    from mpi4py import MPI

    from mpicoll._engine.communicator import Communicator

_PLAIN = (Tensor, Parameter)
_OTHERS = Tensor, np.ndarray  # subclasses, which torch dispatches, and arrays, for `elsewhere`
_coalescing = _world.pg_coalesce_state  # one dictionary for ever; asking the property at each call takes 0.1 us


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    **more: Any,
) -> None:
    """Makes the default group of MPI's ranks, or of those of ``comm`` (collective; returns when all ranks have called it).

    Rank and world size come from MPI: ``init_process_group()`` is enough. Unlike torch's, it takes ``comm``, and without
    ``backend`` it takes MPI.

    For a group of some ranks, call `new_group` on all ranks; for a world of some ranks, give a communicator of them as ``comm``.

    Args:
        backend: None or "mpi": MPI. "cpu:mpi,cuda:nccl": MPI for CPU tensors. Another backend: as in torch.
        init_method: "env://", "tcp://..." or "file://...", as in torch. None: MPI tells the ranks where to meet. "mpi://": MPI
            does so for any backend.
        timeout: Limit of this call and of each operation of the group. None: MPICOLL_TIMEOUT, or 30 minutes.
        world_size: -1: MPI knows. Another number is refused; if the variable WORLD_SIZE has it, too, it is ignored.
        rank: The same, with RANK.
        store: Used as the store of the group instead of a new one. Give this or ``init_method``.
        group_name: As in torch, without effect.
        pg_options: For mpi a dict, the group's own ``MPICOLL_ON_TIMEOUT``; otherwise as in torch.
        device_id: As in torch, for other backends.
        comm: An mpi4py communicator that is to be the world. It is duplicated and never used itself. None: MPI.COMM_WORLD.
        more: Arguments that only other versions of torch have; passed on.

    Raises:
        LaunchError: There is no MPI, the launcher does not belong to it, or rank or world_size contradict MPI.
        OperationTimeout: A rank did not come in time; the message names it.
        ThreadLevelError: MPI runs below MPI_THREAD_SERIALIZED.
        ValueError: There is a default group already, or MPICOLL_TIMEOUT has a value that is not allowed.

    Example:
        >>> dist.destroy_process_group()
        >>> dist.init_process_group()
        >>> dist.get_backend()
        'mpi'
    """
    register.autoload()  # torch did it at import, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0
    if comm is not None and not distributed_c10d.is_initialized():
        runtime.start(comm)
    given = _given(
        init_method=init_method, timeout=timeout, world_size=world_size, rank=rank, store=store, group_name=group_name,
        pg_options=pg_options, device_id=device_id,
    )  # fmt: skip
    try:
        torch.distributed.init_process_group("mpi" if backend is None else backend, **given, **more)
    except BaseException as error:
        if comm is not None and not distributed_c10d.is_initialized():
            runtime.stop()
        if isinstance(error, LaunchError):
            raise error.with_traceback(None) from None
        raise


def _given(**arguments: Any) -> dict[str, Any]:
    """Those that are not torch's defaults: a program may have wrapped torch's function, with fewer parameters."""
    defaults = (int, -1), (str, ""), (bool, False)
    return {name: value for name, value in arguments.items() if value is not None and (type(value), value) not in defaults}


# -- groups ---------------------------------------------------------------------------------------------------------------


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
    device_id: torch.device | None = None,
    *,
    comm: MPI.Intracomm | None = None,
    **more: Any,
) -> ProcessGroup:
    """Makes a group as torch's `new_group`, or of the ranks of ``comm`` (collective over them), which may be of several worlds.

    A trainer and a solver may be started as one job, each with a default group of its own, which goes on as before. In a group
    over ``comm``, the rank in ``comm`` is the rank in the group and, for ``src`` and ``dst``, the global rank.

    Args:
        ranks: Global ranks; None: all. Not with ``comm``.
        timeout: Limit of this call and of each operation of the group. None: MPICOLL_TIMEOUT, or 30 minutes.
        backend: None: that of the default group; with ``comm``, MPI.
        pg_options: For mpi a dict, the group's own ``MPICOLL_ON_TIMEOUT``; otherwise as in torch.
        use_local_synchronization: Only the members call. Not with ``comm``.
        group_desc: A description of the group.
        device_id: As in torch, for other backends. Not with ``comm``.
        comm: An mpi4py communicator. It is duplicated and never used itself.
        more: Arguments that only other versions of torch have; passed on. Not with ``comm``.

    Returns:
        The group; `GroupMember.NON_GROUP_MEMBER` if this rank is not in it (``comm`` is MPI.COMM_NULL).

    Raises:
        OperationTimeout: A member did not come in time; names it.
        TypeError: ``comm`` is no communicator of mpi4py, or an intercommunicator, which ``Merge`` makes one of all ranks.
        ValueError: There is no default group, or an argument is given that does not go with ``comm``.

    Example:
        >>> group = dist.new_group(comm=dist.get_comm())
        >>> dist.get_process_group_ranks(group)
        [0, 1]
    """
    of_comm = _given(timeout=timeout, pg_options=pg_options, group_desc=group_desc)
    given = _given(ranks=ranks, use_local_synchronization=use_local_synchronization, device_id=device_id) | more
    if comm is None:
        return torch.distributed.new_group(**given, **of_comm, **_given(backend=backend))  # type: ignore[no-any-return]
    if given or backend not in (None, "mpi", "mpicoll"):
        excess = ", ".join(given) or f"backend {backend!r}"
        raise ValueError(f"new_group: {excess} given with comm, whose ranks are the group, over MPI")
    distributed_c10d._get_default_group()  # raises torch's error
    from mpicoll._c10d import init  # it starts MPI

    return init.spanning(comm, **of_comm)  # type: ignore[no-any-return]


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> ProcessGroup | None:
    """Splits a group; every member of a part gets that part as a group (collective over the members of a part).

    Unlike torch's, it works without an accelerator, with every version of torch.

    Args:
        parent_pg: The group to split; None means the default group.
        split_ranks: One list of ranks within the parent for each part. Lists may not overlap.
        timeout: Of the new group; None: MPICOLL_TIMEOUT, or torch's default of 30 minutes.
        pg_options: For mpi a dict, the new group's own ``MPICOLL_ON_TIMEOUT``; otherwise as in torch.
        group_desc: A description of the new group.
        backend: As in torch; if given, torch splits the group.

    Returns:
        This rank's part, or None if it is in no part.

    Raises:
        ValueError: ``split_ranks`` is missing, a part is empty, or a rank is not in the parent or is named twice.
        OperationTimeout: A member of this part did not come in time.

    Example:
        >>> part = dist.split_group(split_ranks=[[0], [1]])  # on 2 ranks
        >>> part.size()
        1
    """
    parent = of(parent_pg)
    if parent is None or backend is not None:
        extra = {} if backend is None else {"backend": backend}
        return torch.distributed.split_group(parent_pg, split_ranks, timeout, pg_options, group_desc, **extra)  # type: ignore[arg-type]
    if not split_ranks:
        raise ValueError("split_group: split_ranks must be given: one list of the parent's ranks for each part")
    named = [rank for part in split_ranks for rank in part]
    if any(len(part) == 0 for part in split_ranks):
        raise ValueError(f"split_group: a part of split_ranks {[list(part) for part in split_ranks]} is empty")
    if len(set(named)) != len(named):
        raise ValueError(f"split_group: split_ranks {[list(part) for part in split_ranks]} name a rank twice")
    for rank in named:
        checks.group_rank("split_group", "one of split_ranks", rank, parent.size)
    mine = next((part for part in split_ranks if parent.rank in part), None)
    if mine is None:
        return None
    ranks = [parent.global_ranks[rank] for rank in sorted(mine)]
    # torch < 2.13 has no sort_ranks: it always sorts, so that a parent whose global ranks are not in order cannot exist there.
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    given = _given(timeout=timeout, pg_options=pg_options, group_desc=group_desc)
    return torch.distributed.new_group(ranks, use_local_synchronization=True, **given, **order)  # type: ignore[no-any-return]


def get_reconfigure_handle() -> str:
    """Returns the name of this process for `reconfigure`, the same for as long as it lives (not collective).

    Raises:
        ValueError: There has been no default group of all ranks of MPI.

    Example:
        >>> handle = dist.get_reconfigure_handle()  # "mpi:0:node1:4711": rank in MPI.COMM_WORLD, host, process
    """
    from mpicoll._c10d import shrinking

    return shrinking.handle()


def reconfigure(uuid: int, handles: Sequence[str] | Set[str], timeout: timedelta | None = None) -> ProcessGroup:
    """Makes the default group of other processes of this job, and returns it (collective over these processes).

    Other processes of the job need not call, and may be dead (``python -m mpicoll.run --fault-tolerant``). One that was left out
    can be in a later list. All groups are destroyed; operations that have not ended fail.

    Args:
        uuid: The same number on all processes of ``handles``; another one for each call.
        handles: The results of `get_reconfigure_handle` of the processes. A list has them in the order of their new ranks. A set
            is sorted by rank in MPI.COMM_WORLD.
        timeout: How long to wait for the processes; None: the timeout of the group, which the new group keeps.

    Returns:
        The new default group.

    Raises:
        OperationTimeout: A process did not come in time, or its program has ended; names its rank in MPI.COMM_WORLD. The groups
            stay as they are.
        PeerLost: A process of ``handles`` has died. ``ranks`` are those in MPI.COMM_WORLD.
        RuntimeError: This process has used ``uuid`` before, or is not in ``handles``.
        ValueError: A handle is not of this job or is there twice, or there has been no default group of all ranks of MPI.

    Example:
        >>> handles = [None] * dist.get_world_size()
        >>> dist.all_gather_object(handles, dist.get_reconfigure_handle())
        >>> group = dist.reconfigure(1, handles)  # handles[1:], called by these processes alone, leaves rank 0 out
    """
    from mpicoll._c10d import shrinking

    limit_s = None if timeout is None else timeout.total_seconds()
    return shrinking.reconfigure(uuid, handles, limit_s)  # type: ignore[no-any-return]


def shrink(timeout: timedelta | None = None) -> ProcessGroup:
    """Makes the world again, of the ranks that live, and returns its group (collective over them).

    All groups are destroyed. Ranks get new numbers from 0, in the old order. If further ranks die meanwhile, they are left out
    too. Needs a job that goes on when a rank dies: ``python -m mpicoll.run --fault-tolerant``. torch.distributed has no such
    function.

    Args:
        timeout: Of the new world; None: as before.

    Returns:
        The new default group.

    Raises:
        LaunchError: The job ends when a rank dies.
        ValueError: There is no default group, or another backend has made it.

    Example:
        >>> tensor = torch.ones(2)
        >>> try:
        ...     dist.all_reduce(tensor)
        ... except dist.PeerLost:
        ...     group = dist.shrink()
    """
    from mpicoll._c10d import shrinking  # it needs MPI, which `from mpicoll import shrink` does not start

    return shrinking.shrink(None if timeout is None else timeout.total_seconds())  # type: ignore[no-any-return]


def shrink_group(
    ranks_to_exclude: list[int], group: ProcessGroup | None = None, shrink_flags: int = 0, pg_options: Any = None
) -> ProcessGroup:
    """Makes a group again without some ranks, and returns it (collective over the other ones).

    Dead ranks are left out whether they are named or not. The default group: all groups are destroyed, and ranks get new numbers.
    In a fault-tolerant job the call then waits until the excluded ranks are dead or have come to the end of their program.
    Another group: it alone is destroyed. If it has lost a rank, all excluded ranks must be dead. Unlike
    torch's, it is not for NCCL only.

    Args:
        ranks_to_exclude: Ranks within the group. They must not call this.
        group: None: the default group.
        shrink_flags: 0 (SHRINK_DEFAULT): waits for the group's queued operations. 1 (SHRINK_ABORT): does not.
        pg_options: As in torch; for groups of other backends.

    Returns:
        The new group.

    Raises:
        TypeError: ``ranks_to_exclude`` is no list of ranks, or the group is of a backend that cannot shrink.
        ValueError: The ranks are not in the group, are named twice, or are all ranks.
        RuntimeError: This rank is excluded.
        PeerLost: A rank has died that was not excluded.

    Example:
        >>> group = dist.new_group([0, 1])
        >>> if dist.get_rank() == 0:
        ...     alone = dist.shrink_group([1], group)
    """
    if of(group) is None:
        return torch.distributed.shrink_group(ranks_to_exclude, group, shrink_flags, pg_options)
    from mpicoll._c10d import shrinking

    return shrinking.without(ranks_to_exclude, group, shrink_flags)  # type: ignore[no-any-return]


# -- the communicator of a group ---------------------------------------------------------------------------------------------


def of(group: Any, tensor: Any = None) -> Communicator | None:
    """The communicator that carries this tensor in this group; None if torch must do it.

    Called by every operation (0.3 us), so it is one function and not two. None for arrays of NumPy, too: `elsewhere` takes them.
    Anything else that is no tensor leaves it to the group.
    """
    if is_dynamo_compiling():  # the tracer of torch.compile knows torch's functions; it runs nothing below
        return None
    if type(tensor) in _PLAIN:
        if (not tensor.is_cpu and not _carries(group, tensor.device)) or _coalescing:
            return None
    elif isinstance(tensor, _OTHERS):
        return None
    if group is None:
        group = _world._default_pg
    try:
        return _found[group]
    except (KeyError, TypeError):
        return _find(group)


def elsewhere(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Lets torch do what `of` has left to it, by its ``function``; with arrays of NumPy ours does it, on tensors of their memory.

    Raises:
        TypeError, ValueError: An array has a dtype or strides that no tensor has, or is read-only.
    """
    if is_dynamo_compiling() or not any(map(_has_array, (*arguments, *named.values()))):
        return function(*arguments, **named)
    ours = getattr(mpicoll, function.__name__)
    try:
        tensors = [as_tensors(value) for value in arguments]
    except (TypeError, ValueError) as raw:
        error = type(raw)(f"{function.__name__}: {raw}")
        group = inspect.signature(ours).bind(*arguments, **named).arguments.get("group")
        if (communicator := of(group)) is not None:
            communicator.refused(function.__name__, error)
        raise error from None
    return ours(*tensors, **named)


def _has_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (type(value) is list and any(map(_has_array, value)))


def as_tensors(value: Any) -> Any:
    """A tensor over the memory of an array, also of each array in a list; other values as they are."""
    if isinstance(value, np.ndarray):
        if not value.flags.writeable:
            raise ValueError(f"an array of shape {value.shape} is read-only; pass a copy of it")
        return torch.from_numpy(value)
    return [as_tensors(each) for each in value] if type(value) is list else value


def of_all(group: ProcessGroup | None, tensors: Any) -> Communicator | None:
    """The communicator that carries all of these tensors, which are a list, or one tensor; None if torch must do it."""
    found = [of(group, tensor) for tensor in as_list(tensors)]
    return found[0] if found and all(found) else None


def as_list(tensors: Any) -> list[Tensor]:
    """Returns a list; torch takes a single tensor for a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def without_torch(operation: str, group: Any, tensor: Any = None) -> Communicator | None:
    """Returns the communicator for an operation that torch does not have; None if this rank is not in the group.

    Raises:
        ValueError: The group has been destroyed, has another backend or is in a coalescing manager, or there is no default group.
        TypeError: A subclass of Tensor.
    """
    communicator = of(group, tensor)
    if communicator is not None or group == GroupMember.NON_GROUP_MEMBER:
        return communicator
    communicator = torch_world.communicator(operation, group)  # raises, unless the reason is the tensor or a hook
    if isinstance(tensor, Tensor) and type(tensor) not in _PLAIN:
        raise TypeError(f"{operation}: needs a plain tensor, got a {type(tensor).__name__}")
    if not _coalescing and (not isinstance(tensor, Tensor) or tensor.is_cpu or _carries(group, tensor.device)):
        return communicator
    raise ValueError(
        f"{operation}: the backend 'mpi' does not move this tensor, or a coalescing manager is open, which cannot hold it"
    )


def _carries(group: Any, device: torch.device) -> bool:
    """Whether the engine moves tensors of this kind of device in this group; in "cpu:mpi,cuda:nccl" it moves no CUDA tensors.

    True for meta tensors: the engine refuses them, and some versions of torch would do nothing.
    """
    known: dict[Any, str] = _world.pg_backend_config
    return f"{device.type}:mpi" in known.get(_world.default_pg if group is None else group, "") or device.type == "meta"


def _find(group: Any) -> Communicator | None:
    if not isinstance(group, ProcessGroup):
        if group is None or group == GroupMember.NON_GROUP_MEMBER:
            return None
        raise _no_group(group)
    from mpicoll._engine.registry import registry

    config = _world.pg_backend_config.get(group, "")
    if "cpu:mpi" not in config or group in hooks.hooked:  # another backend's, or destroyed; or torch calls its hooks
        return None
    communicator = registry.find(group.group_name)
    if communicator is not None:
        _found[group] = communicator
    return communicator


def _no_group(group: Any) -> TypeError:
    default, frame = of(None), sys._getframe(1)
    while frame.f_back is not None and str(frame.f_back.f_globals.get("__name__")).startswith("mpicoll._api"):
        frame = frame.f_back  # up to the function that the program has called
    operation = frame.f_code.co_name
    if default is None:
        return TypeError(f"{operation}: group must be a ProcessGroup or None, got {type(group).__name__} {group!r}")
    from mpicoll._c10d import refused_by_torch

    return refused_by_torch.no_group(default, operation, group)


def peer(communicator: Communicator, operation: str, what: str, global_rank: int | None, group_rank: int | None) -> int:
    """The group rank of the peer ("src" or "dst") that a call names, by its global rank or by its group rank.

    Raises:
        ValueError: None or both are given, or the group has no such rank.
    """
    if group_rank is None and type(global_rank) is int:
        ranks = communicator.global_ranks
        if 0 <= global_rank < len(ranks) and ranks[global_rank] == global_rank:
            return global_rank
        if global_rank in ranks:
            return ranks.index(global_rank)
    try:
        return _peer(communicator.global_ranks, operation, what, global_rank, group_rank)
    except (TypeError, ValueError) as error:
        communicator.refused(operation, error)
        raise


def _peer(ranks: tuple[int, ...], operation: str, what: str, global_rank: Any, group_rank: int | None) -> int:
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError(f"{operation}: {what} and group_{what} are both given; give one")
        return checks.group_rank(operation, what, group_rank, len(ranks))
    if global_rank is None:
        raise ValueError(f"{operation}: {what} (a global rank) or group_{what} must be given")
    return checks.global_rank(operation, what, global_rank, ranks)


dynamo.skip_frames(__name__)
