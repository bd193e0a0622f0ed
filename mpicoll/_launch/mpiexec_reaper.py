"""Kills an mpiexec that does not end after all of its ranks have ended.

mpiexec of Open MPI 5 can hang for ever and ignore SIGTERM if a rank fails while another rank starts MPI (5 of 5 runs with
5.0.11). `mpicoll.run` becomes mpiexec (exec), so that signals and the exit status are those of mpiexec; before that it starts
the reaper. The reaper is not a child of mpiexec, holds none of its files except standard error, and ends when mpiexec ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

from mpicoll._launch import processes
from mpicoll._waits import LEFT_BEHIND_S, STARTED_AFTER_S

POLL_S = 0.2


def start(pid: int) -> bool:
    """Starts a reaper for process ``pid``. Returns False where the system lacks what it needs: Linux 5.3, children in /proc."""
    if not hasattr(os, "pidfd_open") or not hasattr(os, "fork") or children(pid) is None:
        return False
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    middle = os.fork()
    if middle != 0:
        os.close(handle)
        os.waitpid(middle, 0)
        return True
    # The reaper is the child of a child: mpiexec replaces this process, and must not find a child that it has not started.
    if os.fork() != 0:
        os._exit(0)
    status = 1
    try:
        os.setsid()  # Ctrl-C is meant for mpiexec
        _keep_only_errors(handle)
        watch(pid, handle)
        status = 0
    finally:
        os._exit(status)


def watch(pid: int, handle: int) -> None:
    """Waits until the process has ended. Kills it if it has had children and has none for LEFT_BEHIND_S."""
    began = time.monotonic()
    had_children, last_seen = False, began
    while not select.select([handle], [], [], POLL_S)[0]:
        now = time.monotonic()
        if children(pid) != []:
            had_children, last_seen = True, now
        if (had_children or now - began > STARTED_AFTER_S) and now - last_seen > LEFT_BEHIND_S:
            text = f"mpicoll.run: all ranks have ended, but mpiexec (process {pid}) has not; killing it"
            print(text, file=sys.stderr, flush=True)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return


def children(pid: int) -> list[int] | None:
    """The living children of ``pid``, without zombies; None if they cannot be read or the process has ended."""
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return None
    return [int(child) for text in lists for child in text.split() if processes.alive(int(child))]


def _keep_only_errors(handle: int) -> None:
    """Closes all files but standard error: a reader of the output of mpiexec waits until every copy is closed."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != handle:
            with contextlib.suppress(OSError):  # the one of the listing
                os.close(number)
