"""The rank and the number of ranks that a program names, compared with MPI, which decides.

They come in the arguments of init_process_group, in its URL, in environment variables, or with a world of another backend.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mpicoll._base import launcher
from mpicoll._base.errors import LaunchError
from mpicoll._faults import arrival
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
        arrival.everyone(mpi, "new_group", limit_s)
