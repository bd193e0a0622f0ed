"""Questions to ranks whose calls cannot be seen from here, most of them on other nodes: what each has done last.

The watchdog sends questions (questions.py), receives the answers, and answers for this rank. From these answers `absent` finds
the ranks that are late and those that do not answer.

An answer comes when the other rank has its interpreter again, and this rank may wait for something else by then. So a question
carries the number of its wait, and an answer counts for that wait only.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mpicoll._base.facts import UNKNOWN, Facts
from mpicoll._base.group_errors import GroupDestroyed
from mpicoll._base.waits import SILENT_S
from mpicoll._faults import questions
from mpicoll._faults.call_comparison import NOTHING, PROGRAM_ENDED, counted, newest, state
from mpicoll._faults.group_state import GroupState
from mpicoll._faults.questions import WHERE, Answer, Question
from mpicoll._tensors import signatures

MOST_ASKED = 32  # questions of a rank about one group at one look


class Position(NamedTuple):
    """Where a rank is in the order of a group.

    Attributes:
        group: The name of the group.
        begun: Number of collectives that the rank has begun on it.
        words: What it did last.
        left: Why the rank will begin no more, in words that follow its number; empty: it may begin more.
        call: Its call at the place that was asked for; None if it has not come there.
        ending: How the rank has left the group (`GroupState.ending`); empty: it has not.
    """

    group: str
    begun: int
    words: str
    left: str = ""
    call: Facts | None = None
    ending: str = ""


class Absent(NamedTuple):
    """A rank of the world that an operation waits for. ``never``: it will not come any more. ``ended``: its process has ended."""

    rank: int
    words: str
    never: bool = False
    ended: bool = False


class _Wait:
    """What is known of the other ranks while this rank waits in one collective of a group, or in its messages."""

    def __init__(self) -> None:
        self.unanswered: dict[int, float] = {}  # when the oldest question that has no answer was sent, by rank of the world
        self.answers: dict[int, Position] = {}
        self.asked: dict[int, float] = {}  # when a rank was asked last
        self.id = next(_ids)

    def has_come(self, rank: int, number: int) -> bool:
        """Whether the rank has begun the collective of this number. It need not be asked again."""
        return number > 0 and rank in self.answers and self.answers[rank].begun >= number


_ids = itertools.count(1)


def ask(group: GroupState, number: int, ranks: Iterable[int]) -> None:
    """Asks some of these ranks where they are, others at the next call.

    ``number``: of the collective that waits; 0: a message waits.
    """
    for other in [other for other in group.waits if number and other not in (0, number)]:
        del group.waits[other]
    wait: _Wait = group.waits.setdefault(number, _Wait())
    late = [rank for rank in ranks if not wait.has_come(rank, number)]
    for rank in sorted(late, key=lambda rank: wait.asked.get(rank, 0.0))[:MOST_ASKED]:
        questions.ask([rank], Question(WHERE, (group.name, number), wait.id))
        wait.asked[rank] = now = time.monotonic()
        wait.unanswered.setdefault(rank, now)


def heard(group: GroupState, rank: int, answer: Answer) -> bool:
    """Keeps an answer to this group, unless what it is about has ended; another world may have had a group of its name."""
    found: list[_Wait] = [wait for wait in group.waits.values() if wait.id == answer.number]
    for wait in found:
        wait.unanswered.pop(rank, None)
        wait.answers[rank] = answer.value
    return bool(found)


def absent(group: GroupState, number: int, ranks: Iterable[int]) -> list[Absent]:
    """Returns which of these ranks have not begun the collective of this number, or do not answer, as far as is known."""
    wait: _Wait | None = group.waits.get(number)
    now, found = time.monotonic(), list[Absent]()
    if wait is None:
        return found
    for rank in ranks:
        answer, since = wait.answers.get(rank), wait.unanswered.get(rank, now)
        if now - since > SILENT_S:
            silent = "it is stopped, its host or network is lost, or a call in its program holds Python's lock"
            found.append(Absent(rank, f"it has not answered for {now - since:.0f} s: {silent}"))
        elif answer is not None and not wait.has_come(rank, number):
            found.append(Absent(rank, answer.words, bool(answer.left)))
    return found


def gone(world: GroupState, ranks: Sequence[int]) -> tuple[int, str] | None:
    """Asks whether these ranks have left their world. Returns one that has, by the answers so far, and how."""
    ask(world, 0, ranks)
    answers: dict[int, Position] = world.waits[0].answers
    left = (rank for rank in ranks if rank in answers and answers[rank].ending)
    return next(((rank, f"it has {answers[rank].ending} its default group") for rank in left), None)


def other_call(group: GroupState, number: int, own: Facts) -> tuple[int, Facts] | None:
    """Returns a rank that calls something else than ``own`` at this place of the order, and its call."""
    wait: _Wait | None = group.waits.get(number)
    answers = {} if wait is None else wait.answers
    return next(((rank, answer.call) for rank, answer in answers.items() if answer.call not in (None, own)), None)


def own_position(groups: Iterable[GroupState], name: str, number: int, ended: Mapping[str, tuple[int, str]]) -> Position:
    """Returns where this rank is in the group of this name. ``ended``: the groups that it has left."""
    group = next((each for each in groups if each.name == name), None)
    where = f"its process {os.getpid()} on {socket.gethostname()} runs"
    begun, left, its_call, ending = 0, "", None, ""
    if name in ended and (group is None or isinstance(group.broken, GroupDestroyed)):
        begun, ending = ended[name]
        last = str(NOTHING._replace(begun=begun, ending=ending))
        left = f"which has {ending} the group (after {counted(begun)} on it)"
    elif group is None:
        last = "it does not have this group"
    else:
        last, its_call = str(state(group, group.history)), call(group, number)
        begun = group.left - 1 if group.left else group.history[-1][0] if group.history else 0
        if group.left:
            left = f"on which an exception has left its collective {group.left}, {call(group, group.left) or UNKNOWN}, half done"
    return Position(name, begun, f"{last}; {where}", left, its_call, ending)


def ended(collectives: int) -> str:
    """What is said of a rank at its end, after so many collectives on a group."""
    return f"{PROGRAM_ENDED}, after {counted(collectives)} on this group"


def call(group: GroupState, number: int) -> Facts | None:
    """Returns this rank's call at a place of the order; None if it is not known."""
    entry = next((entry for entry in newest(group, number - 1) if entry[0] == number), None) if number > 0 else None
    return None if entry is None else signatures.alike(entry[1], entry[3])[1]
