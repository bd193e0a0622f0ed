"""The log of mpicoll: ``logging.getLogger("mpicoll")``, which prints nothing by default.

MPICOLL_LOG (config.py) lets it print to standard error. A program that sets up `logging` itself needs no variable: the records
have the levels INFO and DEBUG.

# Note [One line for each algorithm]
A line for each call would be thousands of equal lines per second. A group logs an operation once for each algorithm, with the
size of the first call. Calls on the fast path are not logged: they are one MPI call of some microseconds and have no branch for
a log.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache

from mpicoll._base import config, launcher

logger = logging.getLogger("mpicoll")
logger.addHandler(logging.NullHandler())


@cache
def start() -> None:
    """Prints later records to standard error if MPICOLL_LOG is set. Only the first call in a process has an effect."""
    level = wanted_level(os.environ)
    if level is None:
        return
    launch = launcher.detect()
    handler = logging.StreamHandler()  # to standard error
    handler.setFormatter(logging.Formatter(f"mpicoll rank {launch.rank if launch is not None else 0}: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # a handler of the program would print each line a second time


def wanted_level(environ: Mapping[str, str]) -> int | None:
    """The level of MPICOLL_LOG, or None. A wrong value causes a warning only: a log must not end a job."""
    try:
        word = config.get("MPICOLL_LOG", environ)
    except ValueError as error:
        warnings.warn(f"mpicoll: {error}", stacklevel=2)
        return None
    return None if word is None else logging.DEBUG if word == "debug" else logging.INFO


Took = Callable[[str, str, int], None]  # operation, algorithm, bytes


class Algorithms:
    """The algorithms that the operations of one group have taken; see Note [One line for each algorithm]."""

    def __init__(self, group: str, rank: int, size: int) -> None:
        self._where = f"group {group!r} (rank {rank} of {size})"
        self._seen: set[tuple[str, str]] = set()

    def took(self, operation: str, algorithm: str, nbytes: int) -> None:
        """Logs the first call that takes ``algorithm``, with its size."""
        if not logger.isEnabledFor(logging.DEBUG) or (operation, algorithm) in self._seen:
            return
        self._seen.add((operation, algorithm))
        logger.debug("%s: %s of %d bytes: %s", self._where, operation, nbytes, algorithm)
