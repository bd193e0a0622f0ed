"""What mpicoll logs: to ``logging.getLogger("mpicoll")``, which prints nothing by itself.

    MPICOLL_LOG=info     one line, on rank 0, when the first group is made: MPI, launcher, ranks, nodes, GPU path
    MPICOLL_LOG=debug    and, on every rank, each group's sizes and each algorithm that an operation of the group has taken

Either prints to standard error. A program that has set up `logging` itself needs no variable: the records are there at the
levels INFO and DEBUG.

# Note [One line for each algorithm]
A line for each call would be thousands a second, and all alike. A group logs an operation once for each algorithm, with the
size of the call that took it first. Calls below the sizes that a group logs when it is made never come here: those are one MPI
call, some microseconds long, and have no branch for a log.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from functools import cache

from mpicoll import _config
from mpicoll._discovery import detect

logger = logging.getLogger("mpicoll")
logger.addHandler(logging.NullHandler())


@cache
def start() -> None:
    """Prints what is logged from now on, if MPICOLL_LOG says so; once in a process, later calls do nothing."""
    level = wanted_level(os.environ)
    if level is None:
        return
    launch = detect.detect()
    handler = logging.StreamHandler()  # to standard error
    handler.setFormatter(logging.Formatter(f"mpicoll rank {launch.rank if launch is not None else 0}: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # a handler of the program's own would print each line a second time


def wanted_level(environ: Mapping[str, str]) -> int | None:
    """The level of MPICOLL_LOG, or None. A value that is not allowed is a warning: a log must not end a job."""
    try:
        word = _config.get("MPICOLL_LOG", environ)
    except ValueError as error:
        warnings.warn(f"mpicoll: {error}", stacklevel=2)
        return None
    return None if word is None else logging.DEBUG if word == "debug" else logging.INFO


class Algorithms:
    """The algorithms that the operations of one group have taken; see Note [One line for each algorithm]."""

    def __init__(self, group: str, rank: int, size: int) -> None:
        self._where = f"group {group!r} (rank {rank} of {size})"
        self._seen: set[tuple[str, str]] = set()

    def took(self, operation: str, algorithm: str, nbytes: int) -> None:
        """Logs that a call with ``nbytes`` bytes has taken ``algorithm``, the first time."""
        if not logger.isEnabledFor(logging.DEBUG) or (operation, algorithm) in self._seen:
            return
        self._seen.add((operation, algorithm))
        logger.debug("%s: %s of %d bytes: %s", self._where, operation, nbytes, algorithm)
