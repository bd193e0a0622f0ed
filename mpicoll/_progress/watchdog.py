"""Ends the job, with a name for the culprit, when a blocking call has waited longer than its group's timeout.

A thread that waits inside MPI cannot be called back: there is nothing to raise an exception in. So, as torch's NCCL watchdog
does, a thread looks on, says which operation of which group on which rank has been waiting and where the program is, and
aborts the job. Asynchronous operations are left alone: their ``wait`` raises OperationTimeout; and so does a barrier itself.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from typing import TYPE_CHECKING

from mpicoll._cuda import streams
from mpicoll._mpi import abort, exit_handshake

if TYPE_CHECKING:
    from mpicoll._engine.group import Group

EVERYBODY = -1  # the peer of a collective
PATIENCE_S = 3.0  # seconds that a call is blocked before others are asked whether they have left

# Who is inside a blocking call: thread -> (operation, group, since when, the group rank that it waits for, EVERYBODY, or None
# for anybody). A thread writes its own entry only.
inside: dict[int, tuple[str, Group, float, int | None]] = {}
_asked = 0  # questions so far; a blocked rank asks one rank after the other

TIMED_BY_ITSELF = frozenset({"barrier", "monitored_barrier"})  # they may also wait longer than the group's timeout

_thread: threading.Thread | None = None
_wake = threading.Event()
_stopping = False
LONGEST_LOOK_S = 5.0  # seconds between two looks; shorter where a group's timeout is short
_look_s = LONGEST_LOOK_S


def watch(timeout_s: float) -> None:
    """Starts the thread (once), which looks often enough for this timeout."""
    global _thread, _look_s, _stopping
    _look_s = min(_look_s, max(0.05, timeout_s / 10))
    _wake.set()
    if _thread is None:
        _stopping = False
        _thread = threading.Thread(target=_loop, name="mpicoll watchdog", daemon=True)
        _thread.start()


def stop() -> None:
    """Ends the thread."""
    global _thread, _look_s, _stopping
    thread, _thread = _thread, None
    _look_s = LONGEST_LOOK_S
    if thread is not None:
        _stopping = True
        _wake.set()
        thread.join()


def forget() -> None:
    """In a forked child: no thread of the parent's is here."""
    global _thread
    _thread = None
    inside.clear()


def _loop() -> None:
    while not _stopping:
        if _wake.wait(_look_s):  # a group with a shorter timeout, or the end
            _wake.clear()
            continue
        now = time.monotonic()
        entries = list(inside.items())
        for thread, (operation, group, since, _) in entries:
            asynchronous = thread == group.lane.thread_id
            if now - since > group.timeout_s and not asynchronous and operation not in TIMED_BY_ITSELF:
                limit = f"{operation} exceeded the group's timeout of {group.timeout_s:g} s"
                _end(operation, group, f"no end after {now - since:.1f} s", limit)
        blocked = [entry for _, entry in entries if now - entry[2] > PATIENCE_S and entry[1].size > 1]
        if blocked and exit_handshake.possible():
            streams.settle_in()  # this thread asks MPI
            _look_for_leavers(blocked)


def _look_for_leavers(blocked: list[tuple[str, Group, float, int | None]]) -> None:
    """Asks a rank that a blocked call waits for whether its program has ended, and ends the job if one says so."""
    global _asked
    for rank, name, begun in exit_handshake.answers():
        for operation, group, _, peer in blocked:
            if group.name != name or rank not in group.global_ranks:
                continue
            never = begun < group.lane.begun if peer == EVERYBODY else peer == group.global_ranks.index(rank)
            if never or (peer is None and group.size == 2):
                why = f"waits for rank {rank}, whose program has ended (after {begun} collectives on this group)"
                _end(operation, group, why, f"{operation} can never end")
    for _, group, _, peer in blocked:
        others = [rank for rank in range(group.size) if rank != group.rank]
        start = sum(rank < group.rank for rank in others)  # the next rank first, so that not all ask the same one
        whom = others[(start + _asked) % len(others)] if peer in (None, EVERYBODY) else peer
        if whom != group.rank:
            exit_handshake.ask(group.global_ranks[whom], group.name)
    _asked += 1


def _end(operation: str, group: Group, what: str, reason: str) -> None:
    print(f"mpicoll: {group.where(operation)}: {what}; this rank is here:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    abort.abort(reason)
