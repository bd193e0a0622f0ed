"""Groups whose ranks change: reconfigure, shrink and shrink_group.

    reconfigure  the world again, of the processes that the program lists
    shrink       the world again, of the ranks that live
    without      shrink_group: the world or another group again, without the ranks that the program names

What makes the world again is `_remake_world`. It gets a function that makes the communicator.

# Note [All or none]
A rank may die while the world is made again. Then some ranks have a world and others an error. So all ranks that live agree
whether it was made on each of them; if a rank has died meanwhile, all begin again without it.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Sequence, Set
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mpicoll._base.errors import LaunchError
from mpicoll._base.group_errors import CommunicationError
from mpicoll._base.waits import NOTICE_S
from mpicoll._c10d import torch_world, wrapping
from mpicoll._c10d.wrapping import SHRINK_NAMES
from mpicoll._engine.registry import registry
from mpicoll._faults import roll_call, watch
from mpicoll._mpi import runtime, survivors
from mpicoll._mpi.errors import MPIException, not_made, peer_lost

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

DEFAULT, ABORT = 0, 1  # torch's SHRINK_DEFAULT and SHRINK_ABORT
HANDLE = re.compile(r"mpi:(\d+):[^:]+:\d+", re.ASCII)  # rank in MPI.COMM_WORLD, host, process

_used: set[int] = set()  # the uuids that this process has passed to `reconfigure`


# -- reconfigure -----------------------------------------------------------------------------------------------------------


def handle() -> str:
    """The name of this process for `reconfigure`, for as long as it lives."""
    everyone = _of_all("get_reconfigure_handle")
    return f"mpi:{everyone.rank}:{everyone.hostname}:{os.getpid()}"


def reconfigure(uuid: int, handles: Any, limit_s: float | None = None) -> Any:
    """Makes the default group of the processes of ``handles`` (collective over them). Returns it; see `_api.reconfigure`."""
    everyone = _of_all("reconfigure")
    ranks = _ranks(handles, everyone.size)
    default = torch_world.default_group()
    if default is None:
        timeout_s = wrapping.limit(wrapping.complete({}))
    else:
        timeout_s = torch_world.communicator("reconfigure", default).timeout_s
    if uuid in _used:
        raise RuntimeError(f"reconfigure: uuid {uuid} was already used by this process; each call needs a new one")
    _used.add(uuid)

    def communicator() -> Any:
        made = _meet(everyone, ranks, f"{uuid} {ranks} {sorted(handles)}", timeout_s if limit_s is None else limit_s)
        registry.abandon("the group has been reconfigured before this operation has ended")
        return made

    return _remake_world(timeout_s, communicator)


def _of_all(operation: str) -> runtime.Runtime:
    """A runtime of all ranks of MPI.COMM_WORLD, over a communicator that is never revoked."""
    comm = runtime.world_comm()
    if comm is None:
        raise ValueError(f"{operation}: there has been no default group of all ranks of MPI; init_process_group makes it")
    runtime.start()
    return runtime.Runtime(comm, own=True)


def _ranks(handles: Any, size: int) -> list[int]:
    """The ranks in MPI.COMM_WORLD of the handles, in their order; a set is sorted."""
    found = [HANDLE.fullmatch(each) for each in handles]
    ranks = [int(match[1]) if match else size for match in found]
    if any(rank >= size for rank in ranks):
        raise ValueError(f"reconfigure: handles must be those of get_reconfigure_handle() in this job, got {handles}")
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"reconfigure: handles must name each rank of this job once, got {handles}")
    if handle() not in handles:
        raise RuntimeError(f"reconfigure: this process, {handle()!r}, is not among the handles {handles}")
    return sorted(ranks) if isinstance(handles, Set) else ranks


def _meet(everyone: runtime.Runtime, ranks: Sequence[int], about: str, limit_s: float) -> Any:
    """Makes the communicator of these ranks once all of them have come with the same ``about``."""
    if survivors.lost(world=everyone):
        survivors.settle()
    try:
        with watch.end_job_after("reconfigure", limit_s):
            roll_call.members(everyone, ranks, "reconfigure", limit_s, about)
            with everyone.lock:
                return survivors.create_among_dead(everyone.comm, ranks, zlib.crc32(about.encode()) % everyone.tag_ub)
    except MPIException as raw:
        if lost := survivors.lost(NOTICE_S, everyone):
            raise peer_lost("reconfigure", lost) from raw
        raise not_made(raw, "reconfigure") from raw


# -- shrink ----------------------------------------------------------------------------------------------------------------


def shrink(timeout_s: float | None = None) -> Any:
    """Makes the default group again, of the ranks that live (collective over them). Returns it; see `_api.shrink`."""
    communicator = torch_world.communicator("shrink", None)
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
    communicator = torch_world.communicator("shrink_group", group)
    _check(communicator, excluded, flags)
    communicator.ending = "shrunk"
    if flags == ABORT:
        communicator.fail(CommunicationError("aborted by shrink_group"))
    remaining = [rank for place, rank in enumerate(communicator.global_ranks) if place not in excluded]
    if group is not default:
        return _remake_group(group, communicator, remaining)
    return _remake_world(communicator.timeout_s, _survivors if survivors.possible() else lambda: runtime.subset(remaining))


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


# -- making groups again ---------------------------------------------------------------------------------------------------


def _remake_world(timeout_s: float, communicator: Callable[[], Any]) -> Any:
    """Destroys all groups and makes the default group again, over the communicator that the function makes."""
    default = torch_world.default_group()
    backend = "mpi" if default is None else torch_world.backend_of(default)
    if survivors.lost():
        registry.revoke()
    while True:
        comm = communicator()
        if dist.is_initialized():
            dist.destroy_process_group()
        error: Exception | None = None
        root = runtime.process.last_base
        try:
            runtime.start(comm, own=True).frees_base = not survivors.possible()
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
