"""Ends an mpiexec that stays behind after all of its ranks have gone.

Open MPI 5's mpiexec can hang for ever, deaf to SIGTERM, if a rank fails while another one is just starting MPI (seen in
5 of 5 runs with 5.0.11): the job is over, and nobody is told. `mpicoll.run` becomes mpiexec, so that signals and exit
status are mpiexec's own; before that it leaves this watcher behind. The watcher is no child of mpiexec, holds none of
its files but standard error, and ends with it."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

LEFT_BEHIND_S = 5.0  # a healthy mpiexec ends some milliseconds after its last child
POLL_S = 0.2
STARTED_AFTER_S = 20.0  # by then mpiexec has had its children, even if none was seen between two looks


def start(pid: int) -> bool:
    """Leaves a watcher over process ``pid`` behind; False where the system does not offer what it needs (Linux 5.3, a
    /proc with children).
    """
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
    # [1] the child of a child: mpiexec, which takes over this process, must not find a child that it did not start
    if os.fork() != 0:
        os._exit(0)
    status = 1
    try:
        os.setsid()  # Ctrl-C is for mpiexec
        _keep_only_errors(handle)
        watch(pid, handle)
        status = 0
    finally:
        os._exit(status)


def watch(pid: int, handle: int) -> None:
    """Returns when the process has ended; kills it when it has had children, and has had none for LEFT_BEHIND_S."""
    began = time.monotonic()
    had_children, last_seen = False, began
    while not select.select([handle], [], [], POLL_S)[0]:
        now = time.monotonic()
        if children(pid) != []:
            had_children, last_seen = True, now
        if (had_children or now - began > STARTED_AFTER_S) and now - last_seen > LEFT_BEHIND_S:
            print(
                f"mpicoll.run: all ranks have ended, but mpiexec (process {pid}) has not; killing it",
                file=sys.stderr,
                flush=True,
            )
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            return


def children(pid: int) -> list[int] | None:
    """The living children of ``pid``, zombies left out; None if the system does not tell or the process is gone."""
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return None
    return [int(child) for text in lists for child in text.split() if _alive(child)]


def _alive(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def _keep_only_errors(handle: int) -> None:
    """Closes what a reader of mpiexec's output waits for."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != handle:
            try:
                os.close(number)
            except OSError:  # the listing's own
                continue
