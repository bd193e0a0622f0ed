"""The default group, and which communicator a group is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup, distributed_c10d
from torch.nn import Parameter

from mpicoll._c10d import register
from mpicoll._c10d.torch_world import world as _world
from mpicoll._mpi import runtime
from mpicoll._tensors import checks
from mpicoll.errors import GroupDestroyed

if TYPE_CHECKING:  # the engine starts MPI, which belongs to init_process_group, not to `from mpicoll import all_reduce`
    from mpi4py import MPI

    from mpicoll._engine.communicator import Communicator

# What is found for a group on first use; an entry whose group was destroyed is found again.
_found: dict[ProcessGroup, Communicator] = {}
_PLAIN = (Tensor, Parameter)


def init_process_group(*arguments: Any, comm: MPI.Intracomm | None = None, **more: Any) -> None:
    """torch.distributed.init_process_group, with backend "mpi" where none is named (collective).

    Rank and world size come from MPI; the timeout (default 30 minutes) is the group's. With rank, a smaller world_size than
    MPI's and a store or an init_method of tcp:// or file://, the ranks that call it make a world of themselves; MPI's other
    ranks need not call it, but must start MPI as well (``mpicoll.rpc.init_rpc``, ``import mpi4py.MPI``).

    Args:   comm: an mpi4py communicator of your own that is to be the world (it is duplicated, never used itself);
                None: MPI.COMM_WORLD. Everything else: as in torch.
    Raises: LaunchError: no MPI, or a launcher that does not belong to it. ThreadLevelError: MPI runs below
            MPI_THREAD_SERIALIZED. ValueError: there is a default group already.
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

    Called by every operation (0.3 us), so it is one function and not two.

    Args:
        group: None means the default group.
        tensor: None, or anything that is no tensor, leaves it to the group alone.
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
    """Whether tensors of this kind of device are ours in this group: not in "cpu:mpi,cuda:nccl", say, if it is a GPU.

    Meta tensors, too: some versions of torch let them pass, and do nothing.
    """
    known: dict[Any, str] = _world.pg_backend_config
    return f"{device.type}:mpi" in known.get(_world.default_pg if group is None else group, "") or device.type == "meta"


def _find(group: Any) -> Communicator | None:
    if not isinstance(group, ProcessGroup):
        return None
    from mpicoll._engine import registry

    for known in [known for known, communicator in _found.items() if type(communicator.broken) is GroupDestroyed]:
        del _found[known]
    config = _world.pg_backend_config.get(group, "")
    if "cpu:mpi" not in config:  # another backend's, or destroyed
        return None
    communicator = registry.find(group.group_name)
    if communicator is not None:
        _found[group] = communicator
    return communicator


def peer(communicator: Communicator, operation: str, what: str, global_rank: int | None, group_rank: int | None) -> int:
    """The group rank that was named, as a global rank or as a group rank.

    Raises: ValueError: none or both were given, or the group has no such rank.
    """
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError(f"{operation}: {what} and group_{what} are both given; give one")
        return group_rank
    if global_rank is None:
        raise ValueError(f"{operation}: {what} (a global rank) or group_{what} must be given")
    ranks = communicator.global_ranks
    if type(global_rank) is not int:
        global_rank = checks.integer(operation, what, global_rank)
    if global_rank < len(ranks) and ranks[global_rank] == global_rank and global_rank >= 0:
        return global_rank
    try:
        return ranks.index(global_rank)
    except ValueError:
        raise ValueError(
            f"{operation}: {what}: global rank {global_rank} is not in the group, which has ranks {list(ranks)}"
        ) from None
