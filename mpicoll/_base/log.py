"""The log of mpicoll: ``logging.getLogger("mpicoll")``.

What its users must know (a rank for which the others wait, a setting that cannot be used) is a warning, printed to standard
error. A program or a site takes the records elsewhere as those of any library, by a handler of this logger or of the root.
Records of the levels INFO and DEBUG are printed if MPICOLL_LOG (config.py) asks for them.

# Note [One line for each algorithm]
A line for each call would be thousands of equal ones per second. A group logs an operation once for each algorithm, with the
size of the first call. Calls on the fast path are not logged: they take some microseconds and have no branch for a log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache

from mpicoll._base import config, launcher

logger = logging.getLogger("mpicoll")
Took = Callable[[str, str, int], None]  # operation, algorithm, bytes


class _Printer(logging.StreamHandler):  # type: ignore[type-arg]
    """Prints to what is standard error now, unless a handler of the program prints the record to the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream, terminal = sys.stderr, (sys.stderr, sys.__stderr__, sys.stdout, sys.__stdout__)
        others = [each for each in [*logger.handlers, *logging.getLogger().handlers * logger.propagate] if each is not self]
        if not any(each.level <= record.levelno and getattr(each, "stream", None) in terminal for each in others):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        rank = f" rank {getattr(launcher.detect(), 'rank', 0)}" if record.levelno < logging.WARNING else ""
        return f"mpicoll{rank}: {record.getMessage()}"


_printer = _Printer()
_printer.setLevel(logging.WARNING)
logger.addHandler(_printer)


def say(text: str) -> None:
    """A warning, which names its rank where that matters."""
    logger.disabled = False  # `logging.config.dictConfig` disables each logger that exists and that it does not name
    logger.warning("%s", text)


@cache
def start() -> None:
    """Prints later records if MPICOLL_LOG is set. A wrong value causes a warning only: a log must not end a job."""
    try:
        if word := config.get("MPICOLL_LOG"):
            logger.setLevel(word.upper())
            _printer.setLevel(word.upper())
    except ValueError as error:
        say(f"{error}")


class Algorithms:
    """The algorithms that the operations of one group have taken; see Note [One line for each algorithm]."""

    def __init__(self, group: str, rank: int, size: int) -> None:
        self._where = f"group {group!r} (rank {rank} of {size})"
        self._seen: set[tuple[str, str]] = set()

    def took(self, operation: str, algorithm: str, nbytes: int) -> None:
        """Logs the first call that takes ``algorithm``, with its size."""
        if logger.isEnabledFor(logging.DEBUG) and (operation, algorithm) not in self._seen:
            self._seen.add((operation, algorithm))
            logger.debug("%s: %s of %d bytes: %s", self._where, operation, nbytes, algorithm)
