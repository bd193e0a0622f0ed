"""A world of some of MPI's ranks, as in ``init_process_group("mpi", rank=r, world_size=n, init_method="tcp://...")`` if MPI has
more than n ranks. (PyTorch's tutorial on DDP with RPC does so with two of four ranks.)

    members only:  [1] meet at the store that the program names    [2] exchange their MPI ranks there
                   [3] make a communicator of these ranks, which is the world from then on

MPI's other ranks only start MPI, which all ranks of a job do together. RPC goes on over all ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from mpicoll._base.errors import LaunchError
from mpicoll._faults import time_limit
from mpicoll._mpi import runtime

ELSEWHERE = ("env:", "mpi:")  # init methods by which all of MPI's ranks meet


def asked_for(arguments: Mapping[str, Any], size: int, environ: Mapping[str, str] = os.environ) -> bool:
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


def meet(arguments: Mapping[str, Any]) -> dict[str, Any]:
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


@contextlib.contextmanager
def left_on_failure(some: bool) -> Iterator[None]:
    """If the body raises, MPI's world is all ranks again; does nothing unless ``some``."""
    try:
        yield
    except BaseException:
        if some and runtime.start().parent is not None:
            runtime.stop()
        raise


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
