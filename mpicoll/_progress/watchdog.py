"""Aborts the job when a blocking call has waited longer than its group's timeout, and names the culprit.

A thread that waits inside MPI cannot be interrupted, so that no exception can be raised in it. As with torch's NCCL watchdog,
another thread looks on. It prints which operation of which group on which rank waits, and where the program is. Then it aborts
the job. It ignores asynchronous operations, whose ``wait`` raises OperationTimeout, and barriers, which raise it themselves.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import weakref
from typing import NamedTuple

from mpicoll._mpi import abort, exit_handshake, survivors
from mpicoll._progress import expiry, losses, threads
from mpicoll._progress.group_state import EVERYBODY, GroupState

PATIENCE_S = 3.0  # seconds that a call is blocked before this rank asks others whether they have left
LONGEST_LOOK_S = 5.0  # seconds between two looks; shorter if a group's timeout is short
TIMED_BY_ITSELF = frozenset({"barrier", "monitored_barrier"})  # they may also wait longer than the group's timeout

# Blocking messages under way, by thread: (operation, group, start time, group rank that it waits for, or None for any rank).
# A thread writes only its own entry, and is in one message at a time. Collectives are in the history of their group.
inside: dict[int, tuple[str, GroupState, float, int | None]] = {}


class Waiting(NamedTuple):
    """An operation under way. ``peer``: as in `inside`; EVERYBODY: a collective."""

    operation: str
    group: GroupState
    since: float
    peer: int | None
    asynchronous: bool = False


class Watchdog:
    """Looks at all operations under way from its own thread, which starts with the first group and ends with the last one."""

    def __init__(self) -> None:
        self._groups: weakref.WeakSet[GroupState] = weakref.WeakSet()
        self._guard = threading.Lock()  # guards _groups
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._look_s = LONGEST_LOOK_S
        self._asked = 0  # rounds of questions so far; a blocked rank asks one rank after the other

    def add(self, group: GroupState) -> None:
        """Watches a group as long as it lives."""
        with self._guard:
            self._groups.add(group)
        self.watch(group.timeout_s)

    def watch(self, timeout_s: float) -> None:
        """Starts the thread if necessary, and makes it look often enough for this timeout."""
        self._look_s = min(self._look_s, max(0.05, timeout_s / 10), losses.LOOK_S if survivors.possible() else LONGEST_LOOK_S)
        self._wake.set()
        if self._thread is None:
            self._stopping = False
            self._thread = threading.Thread(target=self._loop, name="mpicoll watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        thread, self._thread = self._thread, None
        self._look_s = LONGEST_LOOK_S
        if thread is not None:
            self._stopping = True
            self._wake.set()
            thread.join()

    def forget(self) -> None:
        """Resets the state in a forked child, which does not have the parent's threads."""
        self._thread = None
        self._guard = threading.Lock()
        self._groups.clear()
        inside.clear()

    def _loop(self) -> None:
        while not self._stopping:
            if self._wake.wait(self._look_s):  # a group with a shorter timeout, or the end
                self._wake.clear()
                continue
            if survivors.possible():
                threads.entering()
                losses.look(self._watched())
            now, waiting = time.monotonic(), self._waiting()
            for operation, group, since, _, asynchronous in waiting:
                if now - since > group.timeout_s and not asynchronous and operation not in TIMED_BY_ITSELF:
                    limit = f"{operation} exceeded the group's timeout of {group.timeout_s:g} s"
                    _end(operation, group, f"no end after {now - since:.1f} s", limit)
            blocked = [each for each in waiting if now - each.since > PATIENCE_S and each.group.size > 1]
            if blocked and exit_handshake.possible():
                threads.entering()
                self._look_for_leavers(blocked)

    def _watched(self) -> list[GroupState]:
        with self._guard:
            return list(self._groups)

    def _waiting(self) -> list[Waiting]:
        waiting = [Waiting(*entry) for entry in list(inside.values())]
        for group in self._watched():
            if (current := group.under_way()) is not None:
                _, operation, since, _, asynchronous = current
                waiting.append(Waiting(operation, group, since, EVERYBODY, asynchronous))
        return waiting

    def _look_for_leavers(self, blocked: list[Waiting]) -> None:
        """Asks ranks that blocked calls wait for whether their program has ended. Ends the job, or that rank, if one says so."""
        for rank, name, started in exit_handshake.answers():
            for operation, group, _, peer, _ in blocked:
                if group.name != name or rank not in group.global_ranks:
                    continue
                never = started < group.queue.started if peer == EVERYBODY else peer == group.global_ranks.index(rank)
                if never or (peer is None and group.size == 2):
                    why = f"waits for rank {rank}, whose program has ended (after {started} collectives on this group)"
                    if survivors.possible():
                        exit_handshake.dismiss(rank)
                    else:
                        _end(operation, group, why, f"{operation} can never end")
        for _, group, _, peer, _ in blocked:
            others = [rank for rank in range(group.size) if rank != group.rank]
            start = sum(rank < group.rank for rank in others)  # the next rank first, so that not all ask the same one
            asked = others[(start + self._asked) % len(others)] if peer in (None, EVERYBODY) else peer
            if asked != group.rank:
                exit_handshake.ask(group.global_ranks[asked], group.name)
        self._asked += 1


def _end(operation: str, group: GroupState, what: str, reason: str) -> None:
    print(f"mpicoll: {group.where(operation)}: {what}; this rank is here:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    expiry.expired(reason, ends_job=True)
    abort.abort(reason)


watchdog = Watchdog()
