"""SIGUSR2: the rank writes its flight record (flight_recorder.py), also while it is blocked inside MPI.

# Note [How SIGUSR2 reaches a rank that is blocked inside MPI]
Python runs a signal handler between two bytecodes of the main thread: never, while that thread waits inside MPI. The handler of
faulthandler is a function of C. It writes the stack of the main thread into a pipe at once, and our thread, which polls the
pipe, wakes up. signal.set_wakeup_fd would do as well, but asyncio sets it too. The program's own handler wins: if there is one,
ours is not installed, and one that is installed later replaces ours. So ours is never removed.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path


def write_to(descriptor: int) -> bool:
    """Has the stack of the main thread written there at SIGUSR2. False: the program handles that signal itself."""
    if free := is_free(signal.SIGUSR2):
        faulthandler.register(signal.SIGUSR2, descriptor, all_threads=False)
    return free


def ignore() -> None:
    faulthandler.register(signal.SIGUSR2, os.open(os.devnull, os.O_WRONLY), all_threads=False)


def is_free(number: int) -> bool:
    """True if this process handles, ignores or blocks the signal in no way, neither in Python nor in C."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return signal.getsignal(number) in (signal.SIG_DFL, None)
    lines = dict(line.partition(":")[::2] for line in status.splitlines())
    return not any(int(lines.get(name, "0"), 16) >> (number - 1) & 1 for name in ("SigBlk", "SigIgn", "SigCgt"))
