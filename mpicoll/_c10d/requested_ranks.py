"""The rank and the number of ranks that a program names, compared with MPI, which decides.

They come in the arguments of init_process_group, in its URL, in environment variables, or with a world of another backend.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from mpicoll._base import launcher
from mpicoll._base.errors import LaunchError
from mpicoll._faults import roll_call, time_limit
from mpicoll._mpi import runtime

NAMES = ("rank", "world_size")
UNNAMED = (-1, None)


def unified(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with rank and world_size taken out of the URL, and without values that mean nothing.

    ``init_method="tcp://node1:29500?rank=1&world_size=4"`` becomes ``init_method="tcp://node1:29500", rank=1, world_size=4``,
    as torch takes it. If the URL and the arguments both name them, nothing is changed, and torch raises.
    ``rank=0, world_size=0``, as in PyTorch's tutorial on distributed applications with MPI, counts as naming neither.
    """
    named = {name: arguments[name] for name in NAMES if arguments.get(name) not in UNNAMED}
    if named == {"rank": 0, "world_size": 0}:
        return {name: value for name, value in arguments.items() if name not in NAMES}
    method = arguments.get("init_method")
    if named or not isinstance(method, str):
        return dict(arguments)
    url = urlsplit(method)
    pairs = [part.partition("=") for part in url.query.split("&") if part]
    found = {name: int(value) for name, _, value in pairs if name in NAMES and value.isdigit()}
    if not found:
        return dict(arguments)
    query = "&".join("".join(pair) for pair in pairs if pair[0] not in found)
    return {**arguments, **found, "init_method": urlunsplit(url._replace(query=query))}


def warn_of_contradictions(arguments: Mapping[str, Any], mpi: runtime.Runtime) -> None:
    """Warns if arguments or environment differ from MPI: an outer torchrun, a batch shell or a habit has left them there."""
    launch = launcher.detect()  # agrees with MPI, but differs from `mpi` if the world is a communicator of the user's own
    for argument, variable, truth, launched in (
        ("rank", "RANK", mpi.rank, launch and launch.rank),
        ("world_size", "WORLD_SIZE", mpi.size, launch and launch.size),
    ):
        named = arguments.get(argument, -1)
        if named not in (*UNNAMED, truth):
            _warn(f"init_process_group: {argument}={named} is ignored, MPI says {truth}")
        value = os.environ.get(variable, "")
        if value.isdigit() and int(value) not in (truth, launched):
            _warn(f"init_process_group: the environment says {variable}={value}, MPI says {truth}, and MPI is right")


def _warn(text: str) -> None:
    # _warn, warn_of_contradictions, _init_over_mpi, init_process_group, the wrapper in wrapping.py, the user
    warnings.warn(text, stacklevel=6)


def start_beside(world: Any, arguments: Mapping[str, Any], limit_s: float) -> None:
    """Starts MPI for a new group beside a default group that may be another backend's.

    Raises:
        OperationTimeout: A rank did not come in time to the first such group, for which all ranks start MPI.
        LaunchError: The ranks of the world are not MPI's, or only some ranks call and MPI is not running yet.
    """
    ranks = arguments.get("ranks")
    some = arguments.get("use_local_synchronization") and ranks is not None and len(ranks) < world.size()
    if some and runtime.current() is None:
        raise LaunchError(
            "new_group(backend='mpi', use_local_synchronization=True): MPI is not running yet, and all ranks must start it "
            "together; make the first mpi group without use_local_synchronization, or use "
            "init_process_group(..., init_method='mpi://')"
        )
    mpi = runtime.start()
    if (mpi.rank, mpi.size) != (world.rank(), world.size()):
        raise LaunchError(
            f"new_group(backend='mpi'): this process is rank {world.rank()} of {world.size()} in the default group, but rank "
            f"{mpi.rank} of {mpi.size} in MPI; launch with `python -m mpicoll.run -n {world.size()}` or mpirun, and use "
            "init_method='mpi://' so that the default group takes its ranks from MPI"
        )
    if not some and not mpi.connected:
        roll_call.everyone(mpi, "new_group", limit_s)


# Note [A world of some ranks]
# ``init_process_group("mpi", rank=r, world_size=n, init_method="tcp://...")``, where MPI has more than n ranks, makes a world of
# n of them. (PyTorch's tutorial on DDP with RPC does so with two of four ranks.)
#
#     members only:  [1] meet at the store that the program names    [2] exchange their MPI ranks there
#                    [3] make a communicator of these ranks, which is the world from then on
#
# MPI's other ranks only start MPI, which all ranks of a job do together. RPC goes on over all ranks.
ELSEWHERE = ("env:", "mpi:")  # init methods by which all of MPI's ranks meet


def asks_for_some(arguments: Mapping[str, Any], size: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a call of init_process_group asks for a world of fewer than the ``size`` ranks of MPI.

    A world_size that equals the variable WORLD_SIZE does not count: an outer torchrun or a batch shell has left it there.

    Raises:
        LaunchError: The call asks for it, but names no place where these ranks could meet.
        ValueError: rank is not below world_size.
    """
    rank, world_size = arguments.get("rank", -1), arguments.get("world_size", -1)
    if not isinstance(rank, int) or not isinstance(world_size, int) or rank < 0 or not 0 < world_size < size:
        return False
    if environ.get("WORLD_SIZE") == str(world_size):
        return False
    if rank >= world_size:
        raise ValueError(f"init_process_group: rank={rank} with world_size={world_size}; rank must be below world_size")
    method = arguments.get("init_method")
    if arguments.get("store") is None and (method is None or str(method).startswith(ELSEWHERE)):
        raise LaunchError(
            f"init_process_group: rank={rank}, world_size={world_size}, but MPI has {size} ranks. For a world of all of them, "
            f"leave out rank and world_size; for a world of {world_size} of them, name a place where these can meet: "
            "init_method='tcp://HOST:PORT', 'file:///PATH', or a store"
        )
    return True


def meet_some(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the members' communicator the world (collective over them).

    Returns the arguments with the store at which they have met, instead of the init method.

    Raises:
        LaunchError: A member has not come to the store in time, or two members have the same rank.
    """
    rank, size = arguments["rank"], arguments["world_size"]
    timeout = arguments.get("timeout") or default_pg_timeout
    store = arguments.get("store")
    with time_limit.suspended():  # the store has limits of its own, and raises
        if store is None:
            store, _, _ = next(rendezvous(str(arguments["init_method"]), rank, size, timeout=timeout))
            store.set_timeout(timeout)
        members = _exchange(PrefixStore(f"mpicoll.some_ranks.{size}", store), rank, size, runtime.start().rank, timeout)
    runtime.start_some(members)
    return {**{name: value for name, value in arguments.items() if name != "init_method"}, "store": store}


def _exchange(store: Store, rank: int, size: int, mpi_rank: int, timeout: timedelta) -> list[int]:
    """Returns the members' MPI ranks, in the order of their ranks in the new world."""
    # A store may serve several worlds, one after another. Each world of this size has a number and its own keys.
    world = (store.add("arrived", 1) - 1) // size
    keys = [f"{world}/{member}" for member in range(size)]
    if store.add(f"{keys[rank]}/claimed", 1) > 1:
        raise LaunchError(f"init_process_group: two processes have come as rank {rank} of a world of {size} of MPI's ranks")
    store.set(keys[rank], str(mpi_rank))
    try:
        store.wait(keys, timeout)
    except RuntimeError as error:  # torch's DistStoreError
        missing = [str(member) for member, key in enumerate(keys) if not store.check([key])]
        raise LaunchError(
            f"init_process_group: in a world of {size} of MPI's ranks, rank {', '.join(missing)} has not come to the store "
            f"within {timeout.total_seconds():g} s"
        ) from error
    return [int(store.get(key)) for key in keys]
