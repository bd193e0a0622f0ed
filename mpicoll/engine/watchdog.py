"""Ends the job, with a name for the culprit, when a blocking call has waited longer than its group's timeout.

A thread that waits inside MPI cannot be called back: there is nothing to raise an exception in. So, as torch's NCCL watchdog
does, a thread looks on, says which operation of which group on which rank has been waiting and where the program is, and
aborts the job. Asynchronous operations do not come here: their ``wait`` raises OperationTimeout.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from typing import TYPE_CHECKING

from mpicoll.mpi import abort

if TYPE_CHECKING:
    from mpicoll.engine.group import Group

# Who is inside a blocking call: thread -> (operation, group, since when). A thread writes its own entry only.
inside: dict[int, tuple[str, Group, float]] = {}

_thread: threading.Thread | None = None
_stop = threading.Event()
LONGEST_LOOK_S = 5.0  # seconds between two looks; shorter where a group's timeout is short
_look_s = LONGEST_LOOK_S


def watch(timeout_s: float) -> None:
    """Starts the thread (once), which looks often enough for this timeout."""
    global _thread, _look_s
    _look_s = min(_look_s, max(0.05, timeout_s / 10))
    if _thread is None:
        _stop.clear()
        _thread = threading.Thread(target=_loop, name="mpicoll watchdog", daemon=True)
        _thread.start()


def stop() -> None:
    """Ends the thread."""
    global _thread, _look_s
    thread, _thread = _thread, None
    _look_s = LONGEST_LOOK_S
    if thread is not None:
        _stop.set()
        thread.join()


def forget() -> None:
    """In a forked child: no thread of the parent's is here."""
    global _thread
    _thread = None
    inside.clear()


def _loop() -> None:
    while not _stop.wait(_look_s):
        now = time.monotonic()
        for operation, group, since in list(inside.values()):
            if now - since > group.timeout_s:
                _end(operation, group, now - since)


def _end(operation: str, group: Group, waited: float) -> None:
    print(
        f"mpicoll: {group.where(operation)}: no end after {waited:.1f} s; this rank is here:",
        file=sys.stderr,
        flush=True,
    )
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    abort.abort(f"{operation} exceeded the group's timeout of {group.timeout_s:g} s")
