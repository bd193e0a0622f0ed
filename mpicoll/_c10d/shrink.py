"""shrink and shrink_group: a group again without some of its ranks, dead ones or ones that the program names.

    world      destroys all groups, then makes the world again
    subgroup   destroys the group, then makes a new one; the world stays

# Note [All or none]
A rank may die while the world is made again. Then some ranks have a world and others an error. So all ranks that live agree
whether it was made on each of them; if a rank has died meanwhile, all begin again without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpicoll._base.errors import LaunchError
from mpicoll._base.torch_errors import CommunicationError
from mpicoll._c10d import torch_world
from mpicoll._c10d.wrapping import SHRINK_NAMES
from mpicoll._engine.registry import registry
from mpicoll._mpi import runtime, survivors

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

DEFAULT, ABORT = 0, 1  # torch's SHRINK_DEFAULT and SHRINK_ABORT


def world(timeout_s: float | None = None) -> Any:
    """Makes the default group again, of the ranks that live (collective over them). Returns it.

    Raises:
        LaunchError: The job ends when a rank dies.
        ValueError: There is no default group, or another backend has made it.
    """
    communicator = _communicator("shrink", torch_world.default_group())
    if not survivors.possible():
        raise LaunchError(
            "shrink: this job ends when a rank dies; `python -m mpicoll.run --fault-tolerant` (or mpirun --with-ft ulfm) starts "
            "one that goes on, with Open MPI 5"
        )
    return _remake_world(communicator.timeout_s if timeout_s is None else timeout_s, _survivors)


def shrink_group(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Makes a group again without some of its ranks (collective over the other ones). Returns it; see `_api.shrink_group`."""
    return without(*(arguments.get(name) for name in SHRINK_NAMES[:3]))


def without(excluded: Any, group: Any, flags: int | None) -> Any:
    """`shrink_group` for a group of mpicoll; None: the default group."""
    default = torch_world.default_group()
    group = default if group is None else group
    communicator = _communicator("shrink_group", group)
    _check(communicator, excluded, flags)
    if flags == ABORT:
        communicator.fail(CommunicationError("aborted by shrink_group"))
    remaining = [rank for place, rank in enumerate(communicator.global_ranks) if place not in excluded]
    if group is not default:
        return _remake_group(group, communicator, remaining)
    return _remake_world(communicator.timeout_s, _survivors if survivors.possible() else lambda: runtime.subset(remaining))


def _communicator(operation: str, group: Any) -> Communicator:
    communicator = None if group is None else registry.find(torch_world.name_of(group) or "")
    if communicator is None:
        raise ValueError(f"{operation}: {'there is no default group' if group is None else f'{group} is no group of mpicoll'}")
    return communicator


def _check(communicator: Communicator, excluded: Any, flags: int | None) -> None:
    """Raises the errors of torch's shrink_group."""
    size = communicator.size
    if not isinstance(excluded, list) or any(type(rank) is not int for rank in excluded):
        raise TypeError(f"shrink_group: ranks_to_exclude must be a list of ranks of the group, got {excluded!r}")
    if not excluded or len(set(excluded)) < len(excluded) or min(excluded) < 0 or max(excluded) >= size or len(excluded) == size:
        raise ValueError(f"shrink_group: ranks_to_exclude must name some of ranks 0 to {size - 1}, each once, got {excluded}")
    if flags not in (None, DEFAULT, ABORT):
        raise ValueError(f"shrink_group: shrink_flags must be SHRINK_DEFAULT ({DEFAULT}) or SHRINK_ABORT ({ABORT}), got {flags}")
    if communicator.rank in excluded:
        raise RuntimeError(
            f"shrink_group: rank {communicator.rank} is among the excluded ranks {excluded}, they must not call it"
        )


def _survivors() -> Any:
    """A communicator of the ranks that live and go on."""
    assert runtime.process.last_base is not None
    survivors.settle()
    return survivors.meet(runtime.process.last_base, goes_on=True)


def _remake_world(timeout_s: float, communicator: Callable[[], Any]) -> Any:
    backend = torch_world.backend_of(torch_world.default_group())
    if survivors.lost():
        registry.revoke()
    while True:
        comm = communicator()
        if dist.is_initialized():
            dist.destroy_process_group()
        error: Exception | None = None
        root = runtime.process.last_base
        try:
            runtime.start(comm, own=True)
            with survivors.world_given():
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except Exception as failure:  # noqa: BLE001  see Note [All or none]
            error = failure
            runtime.stop(free=False)
        if not survivors.possible():
            runtime.process.last_base = root
        if _all_have(comm, error):
            return torch_world.default_group()


def _remake_group(group: Any, communicator: Communicator, remaining: Sequence[int]) -> Any:
    backend, lost = torch_world.backend_of(group), survivors.lost()
    comm = None
    if any(rank in lost for rank in communicator.global_ranks):
        communicator.channel.revoke()
        comm = communicator.channel.shrunk()
        remaining = [rank for rank in communicator.global_ranks if rank not in lost]
        registry.provide(remaining, comm)
    dist.destroy_process_group(group)
    timeout, description = timedelta(seconds=communicator.timeout_s), f"{communicator.name}:shrunk"
    return dist.new_group(
        list(remaining), timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=description
    )


def _all_have(comm: Any, error: Exception | None) -> bool:
    """Returns whether every rank has made its group; False: a rank has died. See Note [All or none].

    Raises:
        Exception: ``error``, or a CommunicationError if only other ranks have one; no rank has died.
    """
    if not survivors.possible():
        if error is not None:
            raise error
        return True
    all_have, died = survivors.agree(comm, int(error is None))
    if died or all_have:
        return not died
    raise error or CommunicationError("shrink: another rank could not make the group")
