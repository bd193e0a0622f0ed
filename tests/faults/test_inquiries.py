"""What is known of ranks of other nodes: by answers, which may come late."""

import threading
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from mpicoll._base.facts import Facts
from mpicoll._faults import inquiries, questions
from mpicoll._faults.group_state import EVERYBODY, UnderWay
from mpicoll._faults.inquiries import Position
from mpicoll._faults.questions import WHERE, Answer, Question
from mpicoll._faults.watchdog import Watchdog
from mpicoll._mpi import library, runtime, survivors
from mpicoll._mpi.library import MPI
from tests.support import launch

pytestmark = pytest.mark.ranks(1)

STALLED = str(Path(__file__).parent / "scripts" / "stalled.py")


class Group:
    """What inquiries.py reads of a group."""

    name = "0"

    def __init__(self) -> None:
        self.waits: dict[int, Any] = {}


class Asked(NamedTuple):
    rank: int
    question: Question


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """The questions that are sent."""
    found: list[Asked] = []
    monkeypatch.setattr(questions, "ask", lambda ranks, question: found.extend(Asked(rank, question) for rank in ranks))
    return found


def call(number: int) -> Facts:
    return Facts("all_reduce", nbytes=number)


def answer(question: Question, begun: int, number: int) -> Answer:
    return question.answered(Position(question.about[0], begun, "words", call=call(number)))


def test_a_late_answer_is_about_the_collective_of_its_question(asked: list[Asked]) -> None:
    group: Any = Group()
    for number in (5, 6):
        inquiries.ask(group, number, [1])
    late, current = (each.question for each in asked)
    inquiries.heard(group, 1, answer(late, 5, 1))
    assert inquiries.other_call(group, 6, call(2)) is None
    assert inquiries.absent(group, 6, [1]) == []
    inquiries.heard(group, 1, answer(current, 6, 3))
    assert inquiries.other_call(group, 6, call(2)) == (1, call(3))


def test_an_answer_to_an_earlier_world_counts_for_nothing(asked: list[Asked]) -> None:
    """Its groups have the same names, and its collectives the same numbers."""
    earlier: Any = Group()
    later: Any = Group()
    for group in (earlier, later):
        inquiries.ask(group, 1, [1])
    inquiries.heard(later, 1, answer(asked[0].question, 1, 0))
    assert inquiries.other_call(later, 1, call(1)) is None


def test_a_rank_that_has_left_an_earlier_world_ends_nothing(asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer came when this rank waited in the next world's group of that name, and the job ended."""
    ended: list[Any] = []
    monkeypatch.setattr("mpicoll._faults.watchdog._give_up", lambda *words: ended.append(words[0].group))
    monkeypatch.setattr("mpicoll._faults.watchdog._compare", lambda waiting: None)
    earlier, later = (Mock(waits={}, global_ranks=(0, 1), line=Mock(started=1)) for _ in range(2))
    for group in (earlier, later):
        group.name = "0"
        inquiries.ask(group, 1, [1])
    position = Position("0", 0, "words", "which has destroyed the group")
    waiting = [UnderWay("all_reduce", later, 0.0, EVERYBODY, number=1)]
    for question in (each.question for each in asked):
        Watchdog()._heed([(1, question.answered(position))], [later], waiting)
    assert ended == [later], "the answer to its own question counts"


def test_no_answer_arrives_while_a_rank_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI then refuses to look for messages; the watchdog goes on."""
    monkeypatch.setattr(library, "dead_processes", False)
    monkeypatch.setattr(survivors, "possible", lambda: True)
    comm = Mock()
    comm.Iprobe.side_effect = MPI.Exception(MPI.ERR_OTHER)
    monkeypatch.setattr(runtime, "world_comm", lambda: comm)
    monkeypatch.setattr(runtime, "current", lambda: Mock(lock=threading.Lock()))
    assert questions.answers(WHERE) == []
    assert library.dead_processes


def test_whoever_has_come_is_not_asked_again(asked: list[Asked]) -> None:
    """Each round asks others, so that one that is late among many is found soon."""
    group: Any = Group()
    ranks = range(1, 3 * inquiries.MOST_ASKED + 1)
    rounds = 0
    while rounds == 0 or len(asked) == inquiries.MOST_ASKED:
        asked.clear()
        inquiries.ask(group, 5, ranks)
        rounds += 1
        for rank, question in asked:
            inquiries.heard(group, rank, answer(question, 5 - (rank == 7), "barrier()"))
    assert [rank for rank, _ in asked] == [7]
    assert rounds == 4
    assert [each.rank for each in inquiries.absent(group, 5, ranks)] == [7]


def test_a_rank_is_gone_once_it_has_left_the_world(asked: list[Asked]) -> None:
    """One that an exception has taken out of a collective of the world may still make a group."""
    world: Any = Group()
    assert inquiries.gone(world, [1, 2]) is None
    broken, left = (each.question for each in asked)
    half_done = "on which an exception has left its collective 1, barrier(), half done"
    inquiries.heard(world, 1, broken.answered(Position("0", 0, "words", half_done)))
    assert inquiries.gone(world, [1, 2]) is None
    inquiries.heard(world, 2, left.answered(inquiries.own_position([], *left.about, {"0": (3, "destroyed")})))
    assert inquiries.gone(world, [1, 2]) == (2, "it has destroyed its default group")


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(600)
def test_nobody_is_accused_while_ranks_stall() -> None:
    done = launch(4, STALLED, "10000", "1", timeout_s=550)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: 10000 collectives" for rank in range(4)]
    assert "the ranks call" not in done.stderr
