"""Waits without a core until the ranks of this node have come to a collective, before MPI is called.

MPI's collectives keep a core busy until the last rank comes, and a signal handler of Python cannot run meanwhile. So each rank
shows on its board how many collectives of the group it has begun, and a rank that is early sleeps between two looks:

    [1] at every collective, a rank stores its number in the words of its board
    [2] it looks at the numbers of those that the operation needs, unless it comes in a quick succession
    [3] it calls MPI

A rank that looks stores with the number, in the same word, what it calls, if all ranks wait for all. If two that look differ,
both raise before MPI begins: MPICH ends the process where sizes differ, and other calls exchange wrong bytes. Calls in a quick
succession are compared by the ledger, within a second.

[1] takes 0.05 us and [2] some microseconds. A tight loop of small collectives looks once in 0.5 ms; what begins in between and
then waits keeps its core busy, as a rank does that waits in a small collective for another node: with MPI's non-blocking calls,
which it could test and sleep, 8 bytes to 1 MiB took 0.9 to 2.2 times as long (all_reduce, Open MPI, 2 ranks, TCP; MPICH, 4 ranks:
1.3 to 8 times). In a large one the ranks of all nodes meet first (_host/collectives.py: MEETINGS).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

from mpicoll._mpi import bell
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.boards import Boards
from mpicoll._tensors import signatures
from mpicoll._tensors.calls import DifferentCalls, Signature

STEADY = 8  # looks in a quick succession until there is not one for each call
LOOK_S = 0.5e-3  # from then on between two looks
SUCCESSION = 4  # times as long as this between two looks is the end of a quick succession
MADE_S = 1.0  # for another member to show its number, after the group has been made
CALL_BITS = 16  # of a word, below the number: a checksum of the call, 1 to CALLS; 0: it is not known
CALLS = (1 << CALL_BITS) - 1
SCANS = "scan", "exscan"
POLLS = frozenset({"barrier", "monitored_barrier"})  # they sleep by themselves, and return at a timeout of their own


class Looks:
    """When a call looks before it goes into MPI: the first ones, and one in ``every_s`` of a quick succession."""

    def __init__(self, every_s: float = LOOK_S) -> None:
        self.due = 0.0  # time of the next look
        self._every_s, self._looked, self._succession = every_s, 0.0, 0

    def looked(self) -> None:
        now = monotonic()
        self._succession = self._succession + 1 if now - self._looked < SUCCESSION * self._every_s else 0
        self._looked = now
        self.due = now + self._every_s if self._succession >= STEADY else 0.0


class Nobody(Looks):
    """The attendance of a group that has no other member on this node: no look is ever due."""

    def __init__(self) -> None:
        super().__init__()
        self.words: memoryview[int] = memoryview(array("q", [0, 0]))
        self.place = 0  # of this rank's number in ``words``
        self.wanted = 1  # of the word that says that a rank sleeps until this one has come
        self.due = math.inf

    def word(self, operation: str, signature: Signature, number: int) -> int:
        """Returns the word of a call that looks."""
        return number << CALL_BITS

    def wait(self, operation: str, signature: Signature, number: int, look: Callable[[], Any]) -> None:
        pass

    def wait_for_all(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass


class Attendance(Nobody):
    """The numbers of one group. ``members``: of this node, their ranks of the boards by group rank. ``own``: this group rank."""

    def __init__(self, boards: Boards, key: int, members: dict[int, int], own: int, place: int) -> None:
        super().__init__()
        self.words, self.place, self.due, self.wanted = boards.words, place, 0.0, bell.bell.wanted
        self._boards, self._key, self._own = boards, key, own
        self._members = {member: rank for member, rank in members.items() if member != own}
        self._places: dict[int, int] = {}  # by group rank, once found
        self._for_all = 0  # number of the collective that waits for every member
        self._absent: set[int] = set()  # group ranks that had no number in time, since they have no place left, or are stopped

    def wait_for_all(self, number: int) -> None:
        """Lets the collective of this number wait for every member, whatever it needs."""
        self._for_all, self.due = number, 0.0

    def word(self, operation: str, signature: Signature, number: int) -> int:
        if operation in (*POLLS, *SCANS) or (len(signature) > 2 and signature[2] is not None):
            return number << CALL_BITS  # not every rank would know that another one has raised
        return number << CALL_BITS | signatures.alike(operation, signature)[0] % CALLS + 1

    def close(self) -> None:
        """Gives the place back. Whoever still waits for it goes on."""
        self._boards.give(self.place)

    def wait(self, operation: str, signature: Signature, number: int, look: Callable[[], Any]) -> None:
        """Returns once those members of this node that the operation needs have begun it, or ``look()`` is true.

        ``look`` is called between two looks at a number. It has to move MPI's messages forward: a member may come only after it
        has received one that this rank has started to send.

        Raises:
            DifferentCalls: One of them makes another call.
        """
        if operation in POLLS:
            return
        own, first = self.words[self.place], number << CALL_BITS
        for member in self._members if number == self._for_all else self._needed(operation, signature):
            place = self._places.get(member)
            if place is None or (self.words[place] < first and self.words[place - 1] == self._key):
                place = self._wait_for(member, first, look)
            if place is not None and own & CALLS and _differ(own, self.words[place]):
                raise DifferentCalls
        self.looked()

    def _needed(self, operation: str, signature: Signature) -> Iterable[int]:
        root = signature[2] if len(signature) > 2 else None
        if operation in SCANS:
            return [member for member in self._members if member < self._own]
        if root is None:
            return self._members
        if operation.startswith(("broadcast", "scatter")):
            return [root] if root in self._members else []
        return self._members if root == self._own else []

    def _wait_for(self, member: int, first: int, look: Callable[[], Any]) -> int | None:
        """Returns the member's place, once its word is ``first`` or more; None: it has none."""
        pause, begin, words = Backoff(self._members[member]).pause, monotonic(), self.words
        while (place := self._places.get(member) or self._boards.find(self._members[member], self._key)) is None:
            if look() or member in self._absent or monotonic() - begin > MADE_S:
                self._absent.add(member)
                return None
            pause()
        self._places[member] = place
        while words[place] < first and words[place - 1] == self._key and not look():
            pause()
        return place


def _differ(own: int, other: int) -> bool:
    """Whether two ranks make different calls at one number; False also if the other has gone on, or its call is not known."""
    return own != other and own >> CALL_BITS == other >> CALL_BITS and bool(other & CALLS)


def of_group(boards: Boards, key: int, global_ranks: tuple[int, ...], own: int) -> Nobody:
    """The attendance of a group. A rank that has no place left on its board looks at nobody, and nobody waits for it for long."""
    members = {member: rank for member, rank in enumerate(global_ranks) if rank in boards.ranks}
    place = boards.take(key) if len(members) > 1 else None
    return Nobody() if place is None else Attendance(boards, key, members, own, place)
