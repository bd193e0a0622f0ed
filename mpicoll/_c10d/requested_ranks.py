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
from mpicoll._mpi import runtime

NAMES = ("rank", "world_size")
ENV, MEETING = "env://", ("MASTER_ADDR", "MASTER_PORT")  # where env:// meets
OF_SOME_RANKS = (
    "For a group of some ranks, call new_group([...]) on all ranks; for a world of some ranks, make a communicator of them and "
    "call mpicoll.init_process_group(comm=...)"
)


def unified(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with rank and world_size taken out of the URL, and without values that mean nothing.

    ``init_method="tcp://node1:29500?rank=1&world_size=4"`` becomes ``init_method="tcp://node1:29500", rank=1, world_size=4``,
    as torch takes it. If the URL and the arguments both name them, nothing is changed, and torch raises.
    ``rank=0, world_size=0``, as in PyTorch's tutorial on distributed applications with MPI, counts as naming neither.
    """
    named = {name: arguments[name] for name in NAMES if arguments.get(name) not in (-1, None)}
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


def without_launcher(arguments: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rank and the size of a world that has to be made of processes which no launcher has started; see store_world.py.

    None where a launcher has started this process, MPI runs, not more than one rank is named, or there is no place to meet.
    """
    rank, size = (_number(arguments.get(name), name.upper()) for name in NAMES)
    if rank is None or size is None or not 0 <= rank < size or size == 1 or launcher.started_by_mpi() or runtime.runs():
        return None
    method = str(arguments.get("init_method") or ENV)
    by_env = method.startswith("env:") and arguments.get("store") is None
    if method.startswith("mpi:") or (by_env and not all(name in os.environ for name in MEETING)):
        return None
    return rank, size


def _number(named: object, variable: str) -> int | None:
    value = os.environ.get(variable, "") if named in (-1, None) else str(named)
    return int(value) if value.isdigit() else None


def warn_of_environment(mpi: runtime.Runtime) -> None:
    """Warns if RANK or WORLD_SIZE differ from MPI: an outer torchrun or a batch shell has left them there."""
    launch = launcher.detect()  # agrees with MPI, but differs from `mpi` if the world is a communicator of the user's own
    for variable, truth, launched in (
        ("RANK", mpi.rank, launch and launch.rank),
        ("WORLD_SIZE", mpi.size, launch and launch.size),
    ):
        value = os.environ.get(variable, "")
        if value.isdigit() and int(value) not in (truth, launched):
            text = f"init_process_group: the environment says {variable}={value}, MPI says {truth}, and MPI is right"
            warnings.warn(text, stacklevel=4)  # this function, init_process_group, the wrapper in wrapping.py, the user
