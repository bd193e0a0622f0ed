"""The rank and the number of ranks that a program names, compared with MPI, which decides.

They come in the arguments of init_process_group, in its URL, in environment variables, or with a world of another backend.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

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


# Note [A world of the first ranks]
# ``init_process_group("mpi", rank=r, world_size=n, init_method="tcp://...")``, where MPI has more than n ranks, makes a world of
# MPI's first n ranks. (PyTorch's tutorial on DDP with RPC does so, with two of four.) They meet at the store that it names. MPI's
# other ranks only start MPI, which all ranks of a job do together. RPC goes on over all ranks.


def meet_first(arguments: Mapping[str, Any], mpi: runtime.Runtime, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Makes MPI's first ranks the world, if a call of init_process_group asks for it (collective over them then).

    A world_size that equals the variable WORLD_SIZE does not ask: an outer torchrun or a batch shell has left it there.
    Returns the arguments, with the store at which the ranks have met instead of the init method.

    Raises:
        LaunchError: The call asks for it, but names another rank than MPI, or no place to meet. Or a rank has not come in time.
    """
    rank, size = arguments.get("rank", -1), arguments.get("world_size", -1)
    if rank in UNNAMED or not isinstance(size, int) or not 0 < size < mpi.size or environ.get("WORLD_SIZE") == str(size):
        return dict(arguments)
    method, store = str(arguments.get("init_method") or "env:"), arguments.get("store")
    if rank != mpi.rank or rank >= size or (store is None and method.startswith(("env:", "mpi:"))):
        raise LaunchError(
            f"init_process_group: rank={rank}, world_size={size}, but this is rank {mpi.rank} of {mpi.size} in MPI. For a world "
            f"of all of them, leave out rank and world_size. For one of MPI's first {size} ranks, name their ranks in MPI and a "
            "place where they can meet: init_method='tcp://HOST:PORT', 'file:///PATH', or a store"
        )
    timeout = arguments.get("timeout") or default_pg_timeout
    with time_limit.suspended():  # the store has limits of its own, and raises
        if store is None:
            store, _, _ = next(rendezvous(method, rank, size, timeout=timeout))
            store.set_timeout(timeout)
        world = (store.add(f"mpicoll.first/{size}", 1) - 1) // size  # a store may serve several worlds
        keys = [f"mpicoll.first/{size}/{world}/{member}" for member in range(size)]
        store.set(keys[rank], "")
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:  # torch's DistStoreError
            late = ", ".join(str(member) for member, key in enumerate(keys) if not store.check([key]))
            text = f"in a world of MPI's first {size} ranks, rank {late} has not come within {timeout.total_seconds():g} s"
            raise LaunchError(f"init_process_group: {text}") from error
    runtime.start_some(range(size))
    return {**{name: value for name, value in arguments.items() if name != "init_method"}, "store": store}
