"""The ledger: equal calls have equal words, boards are read whole or not at all, and different calls are found."""

import mmap
import time
from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpicoll
from mpicoll._api import groups
from mpicoll._faults import culprits
from mpicoll._faults.call_comparison import LOOKS, MOST_GROUPS, PATIENT_LOOKS, REMEMBERED, WORLD_ENDED, Ledger
from mpicoll._mpi.boards import MOST, NBYTES, Boards
from mpicoll._mpi.shared_segment import Segment
from mpicoll._tensors import signatures
from tests.faults.mismatches import pairs
from tests.support import agree, everyone

EXCHANGES = ("gather", "scatter", "all_to_all", "all_to_all_single")


def two_boards() -> tuple[Boards, Boards]:
    """As ranks 3 and 5 of one node see them."""
    segment = Segment(mmap.mmap(-1, 2 * NBYTES), ordered=True)
    return Boards(segment, [3, 5], 3), Boards(segment, [3, 5], 5)


def member(
    rank: int, calls: list[tuple[str, tuple[Any, ...]]], first: int = 1, ended: int = 0, broken: Any = None, **more: Any
) -> Any:
    """A group of ranks 3 and 5 that has made these calls."""
    entries = [(number, name, time.monotonic(), call, False) for number, (name, call) in enumerate(calls, first)]
    history = deque(entries, maxlen=REMEMBERED)
    values = {
        "key": "k",
        "rank": rank,
        "global_ranks": (3, 5),
        "history": history,
        "line": SimpleNamespace(history=history, started=first + len(calls) - 1, ended=ended, broken=broken),
        "left": 0,
        "ending": "destroyed",
        "checked": False,
    }
    return SimpleNamespace(**{**values, **more})


def reduce_(nbytes: int, times: int = 1) -> list[tuple[str, tuple[Any, ...]]]:
    return [("all_reduce", (torch.float32, nbytes))] * times


def compare(lower: Any, upper: Any, looks: int = 1) -> list[Any]:
    """Returns what the last of so many looks finds."""
    boards = two_boards()
    first, second = Ledger(boards[0], True), Ledger(boards[1], True)
    first.write([lower])
    second.write([upper])
    assert list(first.compare([lower])) == [], "the lowest rank leaves it to the others"
    for _ in range(looks - 1):
        assert list(second.compare([upper])) == []
    return [mismatch for _, mismatch in second.compare([upper])]


def test_equal_calls_are_no_mismatch() -> None:
    for ahead in (0, 1, 5):
        assert compare(member(0, reduce_(8, 10 + ahead)), member(1, reduce_(8, 10))) == []
        assert compare(member(0, reduce_(8, 10)), member(1, reduce_(8, 10 + ahead))) == []


def test_more_calls_than_a_history_keeps() -> None:
    calls = reduce_(8, REMEMBERED + 500)
    assert compare(member(0, calls), member(1, calls)) == []
    assert compare(member(0, calls), member(1, [*calls[:-1], *reduce_(16)]))[0].number == len(calls)


def test_groups_that_are_checked_before_each_collective_are_not_compared() -> None:
    assert compare(member(0, reduce_(8)), member(1, reduce_(16), checked=True)) == []


def test_failed_groups_are_compared_if_the_other_rank_goes_on() -> None:
    broken = mpicoll.GroupFailed("a test")
    failed = member(0, reduce_(8), broken=broken), member(1, reduce_(16), broken=broken)
    assert compare(*failed, looks=PATIENT_LOOKS + 1) == []
    for pair in ((failed[0], member(1, reduce_(16))), (member(0, reduce_(8)), failed[1])):
        assert compare(*pair, looks=PATIENT_LOOKS) == []
        assert [mismatch.number for mismatch in compare(*pair, looks=PATIENT_LOOKS + 1)] == [1]
    destroyed = member(1, reduce_(16), broken=mpicoll.GroupDestroyed("a test"))
    assert compare(member(0, reduce_(8)), destroyed, looks=PATIENT_LOOKS + 1) == []


def test_a_refusal_is_a_call() -> None:
    texts = "all_reduce, refused: ValueError: a test", "all_reduce(float32, 2 elements)"
    refusal = [("all_reduce", signatures.refused(ValueError("a test")))]
    alone, called = [*reduce_(8, 2), *refusal], reduce_(8, 3)
    assert [tuple(map(str, m.calls)) for m in compare(member(0, alone), member(1, called))] == [texts]
    assert [tuple(map(str, m.calls)) for m in compare(member(0, called), member(1, alone))] == [texts[::-1]]
    assert compare(member(0, alone), member(1, reduce_(8, 2))) == [], "the other rank has not come there"
    other_words = [*reduce_(8, 2), ("all_reduce", signatures.refused(ValueError("a test of rank 1"))), *reduce_(8)]
    assert compare(member(0, alone), member(1, other_words)) == [], "the other rank has refused, too"
    other_call = [*reduce_(8, 2), ("broadcast", signatures.refused(ValueError("a test")))]
    assert len(compare(member(0, alone), member(1, other_call))) == 1


def test_the_first_calls_stand_on_the_board_for_some_looks() -> None:
    """A rank that comes to them seconds later still finds them there. (They were gone at the second look.)"""
    first, second = (Ledger(boards, True) for boards in two_boards())
    for calls in range(1, LOOKS + 1):
        first.write([member(0, reduce_(8, calls))])
        assert [mismatch.number for _, mismatch in second.compare([member(1, reduce_(16))])] == [1]
        second._compared.clear()
    first.write([member(0, reduce_(8, LOOKS + 1))])
    assert list(second.compare([member(1, reduce_(16))])) == []


class Growing(deque[Any]):
    """A history to which the program adds while the watchdog is about to read it."""

    def copy(self) -> Any:
        self.meanwhile()
        return deque(self, self.maxlen)

    meanwhile: Any = staticmethod(lambda: None)


def test_a_collective_begins_while_the_board_is_written() -> None:
    """What is written belongs to one number. (The words of the next collective were written for the one before.)"""
    own = member(0, reduce_(8, 2))
    own.history = Growing(own.history, REMEMBERED)
    later = [*member(0, [("broadcast", (torch.float32, 8, 0))], first=3).history]
    own.history.meanwhile = lambda: own.history.append(later.pop()) if later else None
    boards = two_boards()
    Ledger(boards[0], True).write([own])
    rank = Ledger(boards[1], True).read(3)
    assert rank is not None
    seen = rank.groups["k"]
    assert (seen.begun, str(seen.last)) in [(2, "all_reduce(float32, 2 elements)"), (3, "broadcast(float32, 2 elements, root 0)")]
    assert len(seen.calls) == seen.begun + 1 - seen.first


def test_what_does_not_fit_on_a_board_is_left_out() -> None:
    boards = two_boards()
    many = [member(0, [("all_reduce", (torch.float32, 8 * n + i)) for n in range(400)], key=f"k{i}") for i in range(150)]
    began = time.monotonic()
    Ledger(boards[0], True).write(many)
    assert time.monotonic() - began < 5
    rank = Ledger(boards[1], True).read(3)
    assert rank is not None
    assert 0 < len(rank.groups) <= 100
    assert rank.groups[next(iter(rank.groups))].begun == 400


def test_a_board_that_is_being_written_is_not_read() -> None:
    writer, reader = two_boards()
    assert reader.read(3) is None
    writer.write(b"whole")
    assert reader.read(3) == b"whole"
    writer._memory[24] ^= 1  # the first byte of the text
    assert reader.read(3) is None
    with pytest.raises(ValueError, match="does not fit"):
        writer.write(bytes(MOST + 1))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_board_that_is_written_while_it_is_read(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer makes so many of its steps after the reader has read the version. (An empty text was read.)"""
    writer, reader = two_boards()
    writer.write(b"first")
    left = steps

    def step() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise InterruptedError

    def meanwhile() -> None:
        monkeypatch.setattr(reader, "_order", lambda: None)
        monkeypatch.setattr(writer, "_order", step)
        with suppress(InterruptedError):
            if steps:
                writer.write(b"second")

    monkeypatch.setattr(reader, "_order", meanwhile)
    assert reader.read(3) == (None if steps else b"first")
    assert reader.read(3) == (b"first", None, None, b"second")[steps]


def test_a_rank_can_ask_another_one_once() -> None:
    one, other = two_boards()
    assert not other.asked()
    one.ask(5)
    assert (one.asked(), other.asked(), other.asked()) == (False, True, False)


@pytest.mark.min_ranks(2)
def test_words_are_equal_exactly_for_equal_calls(world: object, rank: int, size: int) -> None:
    """Of all kinds of calls that the tests of mismatches have, on all ranks."""
    group = mpicoll.new_group()
    communicator = groups.of(group)
    assert communicator is not None
    assert communicator.ledger is not None
    calls = list(dict.fromkeys(call for pair in pairs() for call in pair))
    for call in calls:
        call.make(mpicoll, group, rank, size, async_op=False)
    described = [signatures.alike(entry[1], entry[3]) for entry in communicator.history]
    agree(all(others == described for others in everyone(described)))
    # Of these, only sender and receiver know the sizes.
    kinds = {call._replace(count=0) if call.operation in EXCHANGES else call for call in calls}
    agree(len({word for word, _ in described}) == len(kinds) == len({text for _, text in described}), described)
    mpicoll.destroy_process_group(group)


@pytest.mark.parametrize("ending", ["destroyed", "aborted", "shrunk"])
def test_a_group_that_a_rank_has_left(ending: str) -> None:
    """The others read how, and that it will not come to what it has not begun; its calls before that are still compared."""
    boards = two_boards()
    first, second = Ledger(boards[0], True), Ledger(boards[1], True)
    left, waiting = member(0, reduce_(8, 4), ending=ending, ended=4), member(1, reduce_(8, 5), ledger=second)
    first.write([left])
    first.leave(left)
    first.write([left])
    assert list(second.compare([waiting])) == []
    assert culprits.on_node(waiting, 4) == []
    (absent,) = culprits.on_node(waiting, 5)
    assert (absent.rank, absent.never) == (3, True)
    assert f"it has {ending} this group, after 4 collectives on it" in absent.words
    different = member(1, [*reduce_(8, 3), *reduce_(16, 2)])
    assert [mismatch.number for _, mismatch in Ledger(boards[1], True).compare([different])] == [4]


def test_only_the_last_groups_that_a_rank_has_left_are_kept() -> None:
    boards = two_boards()
    first, second = Ledger(boards[0], True), Ledger(boards[1], True)
    for number in range(MOST_GROUPS + 20):
        first.leave(member(0, reduce_(8, 2), key=str(number)))
    first.over = WORLD_ENDED
    first.write([])
    known = second.read(3)
    assert known is not None
    assert known.over == WORLD_ENDED
    assert list(known.groups) == [str(number) for number in range(20, MOST_GROUPS + 20)]
