"""What the ranks of a node have called last: each rank writes it to its board once a second, and the others read it there.

    [1] at every full second of the node's clock the watchdog of each rank takes the newest entries from the history of its
        groups, and writes for each of them a number that is equal for equal calls, and the call of its last collective in words
    [2] it compares them with those of the nearest lower rank of each group on this node

All ranks do this at the same time, so that their entries overlap even where thousands of collectives run in a second.
A collective itself does nothing for the ledger: the cost is a millisecond for 2000 new entries, in the thread that watches.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from threading import Lock
from time import monotonic
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias, TypeVar

from mpicoll._base.errors import MpicollError
from mpicoll._base.facts import UNKNOWN, Facts, last_collective
from mpicoll._base.group_errors import GroupDestroyed
from mpicoll._base.waits import BOARD_S, LOOK_S, RAISES_S
from mpicoll._mpi.boards import MOST, Boards
from mpicoll._tensors import signatures
from mpicoll._tensors.calls import Signature

REMEMBERED = 2000  # collectives of a group whose calls are kept
LOOKS = max(1, round(BOARD_S / LOOK_S))  # whose entries stand on a board
PATIENT_LOOKS = round(RAISES_S / LOOK_S)  # after an error on one rank; the programs may go on
MOST_KNOWN, MOST_GROUPS = 200, 100  # calls and groups on a board
PROGRAM_ENDED, WORLD_ENDED = "its program has ended", "it has destroyed its default group"
LAST_CALLS = 20  # on a board, of a group that the rank has left


# A collective that this rank has begun: (its number on the group, operation, start time, signature, True: asynchronous).
Entry: TypeAlias = "tuple[int, str, float, Signature, bool | None]"


class Line(Protocol):
    """What the watching thread reads of a group's line (`_engine/line.py`)."""

    history: deque[Entry]
    started: int
    ended: int
    broken: MpicollError | None


class Member(Protocol):
    """What the ledger reads of a group (`GroupState`). ``key`` is a name that is equal on all ranks."""

    key: str
    rank: int
    global_ranks: tuple[int, ...]
    history: deque[Entry]
    left: int
    ending: str
    checked: ClassVar[bool]

    @property
    def line(self) -> Line: ...


M = TypeVar("M", bound=Member)


class Seen(NamedTuple):
    """A group as another rank has written it.

    Attributes:
        begun: Number of the last collective that the rank has begun.
        ended: Number of the last one that has ended there.
        last: The call of the last one that it has begun; None: there is none.
        since: When it began, by the node's clock.
        first: Number of the first collective in ``calls``.
        calls: A number for each call; equal numbers are equal calls.
        failed: The group is unusable on that rank.
        left: Number of the collective that an exception has left half done; 0: none.
        ending: How the rank has left the group (`GroupState.ending`); empty: it has not.
    """

    begun: int
    ended: int
    last: Facts | None
    since: float
    first: int
    calls: list[int]
    failed: bool
    left: int
    ending: str = ""

    def __str__(self) -> str:
        """What the rank has done last on the group."""
        if self.ending:
            return f"it has {self.ending} this group, after {counted(self.begun)} on it"
        if self.left:
            place = f"its collective {self.begun} on this group, {self.last}"
            return f"an exception has left {place}, half done, and it can use the group no more"
        return last_collective(self.begun, self.last, monotonic() - self.since if self.ended < self.begun else None)


NOTHING = Seen(0, 0, None, 0.0, 1, [], False, 0)


def counted(collectives: int) -> str:
    return f"{collectives} collective{'' if collectives == 1 else 's'}"


class Rank(NamedTuple):
    """What another rank has written. ``known``: calls in JSON, by their numbers. ``over``: why it makes no group any more."""

    pid: int
    groups: dict[str, Seen]
    known: dict[str, dict[str, Any]]
    over: str = ""
    messages: Sequence[Sequence[float]] = ()  # as in `Ledger.messages`

    def call(self, key: str, number: int) -> Facts | None:
        """Returns the rank's call at this place of a group's order; None if it is not known."""
        seen = self.groups.get(key)
        if seen is None or not seen.first <= number <= seen.begun:
            return None
        if number == seen.begun:
            return seen.last
        return Facts.from_json(self.known.get(str(seen.calls[number - seen.first]), {"operation": UNKNOWN}))


class Mismatch(NamedTuple):
    """Two ranks of a group that have made different calls at one place of the order."""

    number: int
    other: int  # global rank
    calls: tuple[Facts, Facts]  # of the other and of this rank


class Ledger:
    """The boards of this rank's node. All groups of a world share it; ranks are those of the world.

    Attributes:
        compares: Different calls end the job.
    """

    def __init__(self, boards: Boards, compares: bool) -> None:
        self.boards = boards
        self.compares = compares
        self._begun: dict[str, list[int]] = {}  # number of the last collective at the last looks, by group
        self._one_failed: dict[str, int] = {}  # looks since the group became unusable on one of the two ranks, by group
        self._compared: dict[str, int] = {}  # number of the last collective that was compared, by group
        self._guard = Lock()  # guards the other attributes
        self._written: list[object] = []  # the state of the groups when they were last written
        self._ended: dict[str, Seen] = {}  # groups that this rank has left, the last ones at the end
        self.over = ""  # PROGRAM_ENDED or WORLD_ENDED
        self.messages: list[tuple[float, int]] = []  # for which this rank waits: since when, and for which rank; -1: for any rank
        self.boards.write(json.dumps([os.getpid(), {}, {}]).encode())

    def write(self, groups: Iterable[Member]) -> None:
        """[1] Writes the last calls on these groups. Leaves out what does not fit: the groups that were used least recently."""
        used = sorted((group for group in groups if group.history and group.key not in self._ended), key=_last_use)
        with self._guard:
            self._write(used[-MOST_GROUPS:])

    def leave(self, group: Member) -> None:
        """Notes that this rank has left a group, for the next `write`."""
        with self._guard:
            row = self._row(group, self._begun.pop(group.key, []), {})
            calls = row.calls[-LAST_CALLS:]
            self._ended[group.key] = row._replace(first=row.begun - len(calls) + 1, calls=calls, ending=group.ending)
            if len(self._ended) > MOST_GROUPS:
                del self._ended[next(iter(self._ended))]

    def _write(self, used: Sequence[Member]) -> None:
        state: list[object] = [
            (group.key, _begun(group), group.line.ended, group.line.broken is not None, group.left) for group in used
        ]
        state += [self.over, *self.messages, *self._ended]
        if state == self._written:
            return
        self._written = state
        known: dict[str, Any] = {}
        begun, self._begun = self._begun, {}
        seen = [*self._ended.items(), *((group.key, self._row(group, begun.get(group.key, []), known)) for group in used)]
        rows = [(key, [*row[:2], row.last and row.last.as_json(), *row[3:]]) for key, row in seen]
        while len(text := json.dumps([os.getpid(), dict(rows), known, self.over, self.messages]).encode()) > MOST:
            if known:
                known.clear()
            else:
                rows = rows[len(rows) // 2 + 1 :]
        self.boards.write(text)

    def _row(self, group: Member, looks: list[int], known: dict[str, Any]) -> Seen:
        history = newest(group, min(_begun(group) - 1, looks[0] if len(looks) == LOOKS else 0))
        begun = history[-1][0] if history else 0
        described = [signatures.alike(entry[1], entry[3]) for entry in history]
        for word, call in reversed(described):
            if len(known) >= MOST_KNOWN:
                break
            known[str(word)] = call.as_json()
        self._begun[group.key] = [*looks, begun][-LOOKS:]
        return state(group, history)._replace(first=history[0][0] if history else 1, calls=[word for word, _ in described])

    def read(self, rank: int) -> Rank | None:
        """Returns what a rank has written; None if it is on another node, has written nothing, or is writing."""
        text = self.boards.read(rank) if rank in self.boards.ranks else None
        if text is None:
            return None
        pid, groups, *others = json.loads(text)
        return Rank(
            pid, {key: Seen(*row)._replace(last=row[2] and Facts.from_json(row[2])) for key, row in groups.items()}, *others
        )

    def calls(self, group: Member, number: int) -> dict[int, Facts]:
        """Returns the calls at this place of the order, by global rank, of the members on this node that have written them."""
        found = {}
        for rank in group.global_ranks:
            known = self.read(rank)
            if known is not None and (call := known.call(group.key, number)):
                found[rank] = call
        return found

    def compare(self, groups: Iterable[M]) -> Iterator[tuple[M, Mismatch]]:
        """[2] Compares the calls of each group with those of the nearest lower member on this node. Yields mismatches."""
        known: dict[int, Rank | None] = {}
        for group in groups:
            lower = [rank for rank in group.global_ranks[: group.rank] if rank in self.boards.ranks]
            if not lower or group.checked or isinstance(group.line.broken, GroupDestroyed):
                continue
            if lower[-1] not in known:
                known[lower[-1]] = self.read(lower[-1])
            other = known[lower[-1]]
            if other is not None and (mismatch := self._compare(group, lower[-1], other)) is not None:
                yield group, mismatch

    def _compare(self, group: Member, rank: int, other: Rank) -> Mismatch | None:
        seen = other.groups.get(group.key)
        if seen is None:
            return None
        failures = seen.failed + (group.line.broken is not None)
        looks = self._one_failed[group.key] = self._one_failed.get(group.key, 0) + 1 if failures == 1 else 0
        if failures == 2 or 0 < looks <= PATIENT_LOOKS:
            return None
        for entry in newest(group, max(self._compared.get(group.key, 0), seen.first - 1)):
            number = entry[0]
            if number > seen.begun:
                break
            self._compared[group.key] = number
            word, call = signatures.alike(entry[1], entry[3])
            if seen.calls[number - seen.first] != word:
                return Mismatch(number, rank, (other.call(group.key, number) or Facts(UNKNOWN), call))
        return None


def state(group: Member, history: Sequence[Entry]) -> Seen:
    """What this rank has done last on a group."""
    if not history:
        return NOTHING._replace(failed=group.line.broken is not None, left=group.left)
    number, operation, since, signature, _ = history[-1]
    last = signatures.alike(operation, signature)[1]
    return Seen(number, group.line.ended, last, since, number, [], group.line.broken is not None, group.left)


def _begun(group: Member) -> int:
    return group.history[-1][0] if group.history else 0


def _last_use(group: Member) -> float:
    return group.history[-1][2] if group.history else 0.0


def newest(group: Member, after: int) -> list[Entry]:
    """The entries of the group's history with higher numbers than ``after``, the oldest first."""
    history = group.history.copy()
    count = min(REMEMBERED, len(history), max(0, history[-1][0] - after)) if history else 0
    return list(islice(history, len(history) - count, None))
