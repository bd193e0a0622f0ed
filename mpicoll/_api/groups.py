"""init_process_group, and the engine's communicator of each group."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import GroupMember, ProcessGroup, distributed_c10d
from torch.nn import Parameter

from mpicoll._c10d import register
from mpicoll._c10d.torch_world import world as _world
from mpicoll._mpi import runtime
from mpicoll._tensors import checks
from mpicoll.errors import GroupDestroyed

if TYPE_CHECKING:  # the engine starts MPI, which belongs to init_process_group, not to `from mpicoll import all_reduce`
    from mpi4py import MPI

    from mpicoll._engine.communicator import Communicator

# The communicator of each group, entered on first use. If the group has been destroyed since, it is looked up again.
_found: dict[ProcessGroup, Communicator] = {}
_PLAIN = (Tensor, Parameter)


def init_process_group(*arguments: Any, comm: MPI.Intracomm | None = None, **more: Any) -> None:
    """Calls torch.distributed.init_process_group, with backend "mpi" if none is named (collective).

    Rank and world size come from MPI. The timeout (default: MPICOLL_TIMEOUT, or 30 minutes) is the group's.

    A world can also consist of some of MPI's ranks. They pass ``rank``, a ``world_size`` below MPI's, and a store or an
    init_method of tcp:// or file://. MPI's other ranks need not call, but they must start MPI too (``mpicoll.rpc.init_rpc``,
    ``import mpi4py.MPI``).

    Args:
        arguments, more: As in torch.
        comm: An mpi4py communicator that is to be the world. It is duplicated and never used itself. None: MPI.COMM_WORLD.

    Raises:
        LaunchError: There is no MPI, or the launcher does not belong to it.
        ThreadLevelError: MPI runs below MPI_THREAD_SERIALIZED.
        ValueError: There is a default group already.
    """
    register.autoload()  # torch did it at import, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0
    backend = arguments[0] if arguments else more.get("backend")
    if backend is None:
        more["backend"] = "mpi"
        arguments = arguments[1:]
    if comm is not None and not distributed_c10d.is_initialized():
        runtime.start(comm)
    try:
        torch.distributed.init_process_group(*arguments, **more)
    except BaseException:
        if comm is not None and not distributed_c10d.is_initialized():
            runtime.stop()
        raise


def of(group: Any, tensor: Any = None) -> Communicator | None:
    """The communicator that carries this tensor in this group; None if torch must do it.

    Called by every operation (0.3 us), so it is one function and not two. Anything that is no tensor leaves it to the group.
    """
    if is_dynamo_compiling():  # the tracer of torch.compile knows torch's functions; it runs nothing below
        return None
    if type(tensor) in _PLAIN:
        if not tensor.is_cpu and not _carries(group, tensor.device):
            return None
        if _world.pg_coalesce_state:
            return None
    elif isinstance(tensor, Tensor):  # a subclass, which torch dispatches
        return None
    if group is None:
        group = _world.default_pg
    try:
        communicator = _found[group]
    except (KeyError, TypeError):
        return _find(group)
    return _find(group) if type(communicator.broken) is GroupDestroyed else communicator


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

    for known in [known for known, communicator in _found.items() if type(communicator.broken) is GroupDestroyed]:
        del _found[known]
    config = _world.pg_backend_config.get(group, "")
    if "cpu:mpi" not in config:  # another backend's, or destroyed
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
    from mpicoll._c10d import failed_calls

    return failed_calls.no_group(default, operation, group)


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
        return group_rank
    if global_rank is None:
        raise ValueError(f"{operation}: {what} (a global rank) or group_{what} must be given")
    rank = checks.integer(operation, what, global_rank)
    if rank not in ranks:
        raise ValueError(f"{operation}: {what}: global rank {rank} is not in the group, which has ranks {list(ranks)}")
    return ranks.index(rank)
