"""The rank and the number of ranks that a call of init_process_group names, in its arguments or in the URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mpicoll._mpi import runtime

__all__ = ["check", "unified"]

NAMES = ("rank", "world_size")
UNNAMED = (-1, None)


def unified(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with rank and world_size out of the URL, and without values that mean nothing.

    ``init_method="tcp://node1:29500?rank=1&world_size=4"`` becomes ``init_method="tcp://node1:29500", rank=1, world_size=4``,
    as torch takes it. Where the URL and the arguments both name them, nothing is changed, and torch complains.
    ``rank=0, world_size=0`` is how PyTorch's tutorial on distributed applications calls MPI: it names neither.
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


def check(arguments: Mapping[str, Any]) -> None:
    """Refuses several ranks where MPI has one.

    Raises:
        LaunchError: world_size, a rank other than 0, or WORLD_SIZE asks for more ranks than the one that MPI has.
    """
    runtime.check_environment()
    size, rank = arguments.get("world_size"), arguments.get("rank")
    if isinstance(size, int) and size > 1:
        runtime.check_size(size, f"init_process_group: world_size={size}")
    elif size in UNNAMED and isinstance(rank, int) and rank > 0:
        runtime.check_size(rank + 1, f"init_process_group: rank={rank}")
