"""What a rank leaves to the monitor that `mpicoll.run` has put above it; nothing under another launcher.

Through a pipe it says how it ends, in lines of JSON with values of a `mpicoll._launch.reports.Rank`. `why`: the `cause` of an
exception, the reason of an abort, or the exit status of sys.exit. `returned`: the program has come to its end; without it, exit
status 0 is that of _exit(0). `alone`: it has torch, and has neither made a group nor started MPI. `end`: one of its processes
ends it (`end_unless_caught`).

A rank that is killed cannot say anything. So about once a second it writes what it does to memory that outlives it (`doing`). The
monitor reads it after the program has ended. The memory is one anonymous page, made before the monitor forks the program: it has
no name and no file descriptor, and a program that the rank starts does not have it.

    place 1: time | bytes | text     place 2: time | bytes | text     number of the place that is written, 0 at first

Writes go to the two places in turn, and their number is written last. So a program that is killed while it writes leaves the text
before.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mpicoll._base.errors import LaunchError
from mpicoll._base.waits import MONITOR_S

PIPE = "_MPICOLL_PIPE"  # for processes that the rank starts: its file descriptor of the pipe, and what that links to in /proc

TRACEBACK = "Traceback (most recent call last):"  # a line of the message of an error from another process ends so

_about: deque[tuple[str, int]] = deque(maxlen=100)  # see `about`

LONGEST = 1000  # characters; a write to a pipe of up to 4096 bytes is one piece

NBYTES = 4096
_PLACE = NBYTES // 2 - 1  # bytes
_HEADER = struct.Struct("=dI")  # when, by the clock that the processes of a host share; bytes of the text
MOST = _PLACE - _HEADER.size  # bytes of a text


class Memory:
    """Memory that a process shares with the processes that it forks."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NBYTES)

    def write(self, text: str) -> None:
        """Replaces the text. Cuts a longer one than MOST."""
        place = 2 if self._memory[-1] == 1 else 1
        data = text.encode(errors="replace")[:MOST]
        body, first = _HEADER.pack(time.monotonic(), len(data)) + data, (place - 1) * _PLACE
        self._memory[first : first + len(body)] = body
        self._memory[-1] = place

    def read(self) -> tuple[float, str] | None:
        """Returns when the last complete text was written (time.monotonic), and the text; None if there is none."""
        if (place := self._memory[-1]) == 0:
            return None
        at_s, nbytes = _HEADER.unpack_from(self._memory, (place - 1) * _PLACE)
        first = (place - 1) * _PLACE + _HEADER.size
        return at_s, self._memory[first : first + nbytes].decode(errors="replace")


@dataclass
class Monitor:
    """How this rank reaches its monitor."""

    told: int  # file descriptor of the pipe to it
    answers: int  # and of the one from it
    launcher: int  # its parent: mpiexec, or the daemon of mpiexec on this host
    memory: Memory
    rank: int  # the process. A forked child has all of this, too, and is not the rank
    blocking: Callable[[], Iterable[tuple[str, str]]] = tuple  # the operations in which a thread is: name, and in words
    world: dict[int, int] = field(default_factory=dict)  # numbers in the job of the ranks of the world; negative: of another job


_monitor: Monitor | None = None


def use(told: int, answers: int, launcher: int, memory: Memory) -> None:
    """Makes this process the rank of a monitor, a child of ``launcher``, which answers each line."""
    global _monitor
    _monitor = Monitor(told, answers, launcher, memory, os.getpid())
    os.environ[PIPE] = f"{told} pipe:[{os.fstat(told).st_ino}]"


def monitored() -> Monitor | None:
    """The monitor of this process, if it is a rank that has one."""
    return _monitor if _monitor is not None and _monitor.rank == os.getpid() else None


def launcher_pid() -> int:
    """The process that has started this rank, or its monitor."""
    monitor = monitored()
    return os.getppid() if monitor is None else monitor.launcher


def doing(text: str, blocking: Callable[[], Iterable[tuple[str, str]]] = tuple) -> None:
    """Replaces what the monitor will read if this rank is killed, and ``blocking``, which `why` asks."""
    if (monitor := monitored()) is not None:
        monitor.memory.write(text)
        monitor.blocking = blocking


def renumber(world: Sequence[int]) -> None:
    """Gives the ranks of a new world their numbers in the job; see `Monitor`."""
    if (monitor := monitored()) is not None:
        monitor.world = dict(enumerate(world))


def why(text: str, status: int = 1, culprit: tuple[int, bool] | None = None, traceback: bool = False) -> bool:
    """Says why the rank is about to end with ``status``, which it may never reach: MPI_Finalize waits for the other ranks.

    Returns whether another rank has given the same reason, up to numbers, and prints its traceback.

    ``culprit``: the rank of the world that ``text`` is about, if not this one, and whether its process had ended before.
    ``traceback``: the rank is about to print one.
    Adds the operation in which a thread still is, if the `cause` does not name it.
    """
    line, monitor = cause(text), monitored()
    if culprit is not None and monitor is not None:
        number = monitor.world.get(culprit[0], culprit[0])
        culprit = None if number < 0 else (number, culprit[1])
    blocking = [] if monitor is None else monitor.blocking()
    line += next((f"; {words}" for operation, words in blocking if operation not in line), "")
    return _write(why=line[:LONGEST], why_status=status, culprit=culprit, traceback=traceback) == b"known\n"


def cause(text: str) -> str:
    """The line of an error that says what happened: the first one, or what the last traceback within ``text`` ends in."""
    lines = text.strip().splitlines()
    inner = [place for place, line in enumerate(lines) if line.endswith(TRACEBACK)]
    ends = [line for line in lines[inner[-1] + 1 :] if line[:1].strip()] if inner else []
    return (ends or lines or [""])[0]


def about(rank: int, sentence: str) -> str:
    """Notes the rank of the world that has not come, about which an error will say this. Returns the sentence."""
    _about.append((sentence, rank))
    return sentence


def late(ranks: Sequence[int], limit_s: float) -> str:
    """Says that ranks of the world have not come in time."""
    return about(ranks[0], f"rank {', '.join(map(str, ranks))} did not come within the timeout of {limit_s:g} s")


def of_error(error: BaseException) -> tuple[str, tuple[int, bool] | None]:
    """Returns what an uncaught exception says, with its type, and the rank that has not come in time, if it is about one.

    An error of torch may quote ours: that of DDP's backward, say.
    """
    text = cause(f"{type(error).__name__}: {error}".rstrip(": "))
    absent = next((rank for sentence, rank in list(_about)[::-1] if sentence in text), None)
    return (text, None) if absent is None else (f"has not come: {text}", (absent, False))


def why_error(error: BaseException, status: int) -> bool:
    text, culprit = of_error(error)
    return why(text, status, culprit, traceback=True)


def end_unless_caught() -> None:
    """Called in a process that a rank has started by multiprocessing: a LaunchError that it does not catch ends the rank.

    The monitor gets the reason, and the process prints no traceback. Elsewhere this does nothing.
    """
    from multiprocessing import parent_process, util

    if (parent := parent_process()) is not None:
        util.Finalize(None, _end, (parent.pid,), exitpriority=0)


def _end(rank: int) -> None:
    error = sys.exc_info()[1]  # multiprocessing calls this in a `finally` clause
    told, pipe = os.environ.get(PIPE, " ").split(" ")
    path = f"/proc/{rank}/fd/{told}"
    with contextlib.suppress(OSError):
        if isinstance(error, LaunchError) and os.readlink(path) == pipe:  # not if the rank has called os.exec
            with open(path, "wb", buffering=0) as file:
                file.write(_line({"why": f"LaunchError: {error}"[:LONGEST], "end": True}))
            sys.exit(1)


def returned(alone: bool = False) -> None:
    """Says that the program has come to its end, by its last line or by sys.exit. ``alone``: it has worked with no other rank."""
    _write(returned=True, alone=alone)


def left(mpi_runs: bool) -> None:
    """Says that the program is about to end by os._exit(0), and whether MPI still runs in it."""
    _write(left=mpi_runs)


def _line(said: dict[str, object]) -> bytes:
    return json.dumps(said, ensure_ascii=False).encode(errors="replace") + b"\n"


def _write(**said: object) -> bytes:
    """Returns the monitor's answer when it has passed the line on: an abort that follows may kill the monitor too."""
    if (monitor := monitored()) is not None:
        with contextlib.suppress(OSError):  # the monitor has been killed: nobody listens
            os.write(monitor.told, _line(said))
            if select.select([monitor.answers], [], [], MONITOR_S)[0]:
                return os.read(monitor.answers, 100)
    return b""
