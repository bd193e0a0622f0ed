"""What a rank says about its own end, to the monitor that `mpicoll.run` has put above it; nothing under another launcher.

`why`: the first line of an exception, the reason of an abort, or the exit status of sys.exit. `returned`: the program has come to
its end; without this word, exit status 0 is that of os._exit(0).
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterable

from mpicoll._base.waits import MONITOR_S

LONGEST = 1000  # characters; a write to a pipe of up to 4096 bytes is one piece

_pipes: tuple[int, int] | None = None  # to the monitor, and from it
_owner = 0  # a forked child has the pipes, too, and is not the rank
_launcher = 0  # mpiexec, or its daemon on this host
_blocking: Callable[[], Iterable[tuple[str, str]]] = tuple  # the operations in which a thread is: name, and in words


def use(to_monitor: int, from_monitor: int, launcher: int = 0) -> None:
    """Sends the words of this process to a pipe. The monitor, a child of ``launcher``, answers each line by one byte."""
    global _pipes, _owner, _launcher
    _pipes, _owner, _launcher = (to_monitor, from_monitor), os.getpid(), launcher


def launcher_pid() -> int:
    """The process that has started this rank, or its monitor."""
    return _launcher if _launcher and _owner == os.getpid() else os.getppid()


def ask(blocking: Callable[[], Iterable[tuple[str, str]]]) -> None:
    """Makes `why` ask for the operations in which a thread of this process is: the name and the words of each."""
    global _blocking
    _blocking = blocking


def why(text: str, status: int = 1) -> None:
    """Says why the rank is about to end with ``status``, which it may never reach: MPI_Finalize waits for the other ranks.

    Adds the operation in which a thread still is, if the first line of ``text`` does not name it.
    """
    lines = text.strip().splitlines()
    line = lines[0] if lines else ""
    line += next((f"; it was in {words}" for operation, words in _blocking() if operation not in line), "")
    _write(f"why {status} {line[:LONGEST]}")


def why_error(error: BaseException, status: int) -> None:
    """Says the type and the first line of an uncaught exception."""
    why(f"{type(error).__name__}: {error}".rstrip(": "), status)


def returned() -> None:
    """Says that the program has come to its end, by its last line or by sys.exit."""
    _write("returned")


def _write(line: str) -> None:
    """Returns when the monitor has passed the line on: an abort that follows may kill the monitor too."""
    if _pipes is not None and os.getpid() == _owner:
        try:
            os.write(_pipes[0], line.encode(errors="replace") + b"\n")
            if select.select([_pipes[1]], [], [], MONITOR_S)[0]:
                os.read(_pipes[1], 1)
        except OSError:  # the monitor has been killed: nobody listens
            return
