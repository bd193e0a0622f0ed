"""A rank that is early sleeps until the others of its node have come, and its signal handlers run meanwhile."""

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mpicoll as dist
from mpicoll._faults.late_ranks import CALL_BITS, Attendance, Nobody, of_group
from mpicoll._mpi.boards import NBYTES, NUMBERS, Boards
from mpicoll._mpi.shared_segment import Segment
from mpicoll._tensors.calls import DifferentCalls
from tests.support import agree, everyone

LATE_S = 0.6  # seconds
world = pytest.mark.usefixtures("world")
pytestmark = pytest.mark.one_node


def boards_of(size: int) -> list[Boards]:
    segment = Segment(mmap.mmap(-1, size * NBYTES), ordered=True)
    return [Boards(segment, range(size), rank) for rank in range(size)]


def test_a_number_is_read_after_its_key() -> None:
    """A processor of Arm may read a number first: that of an earlier group beside the key of this one."""
    ours, other = boards_of(2)
    index = other.take(5)
    assert index is not None
    seen: list[int] = []
    ours._fence = lambda: seen.append(ours.words[index - 1])
    assert ours.find(1, 5) == index
    assert seen == [5]


def by_message(rank: int, size: int) -> None:
    if rank == 0:
        for other in range(1, size):
            dist.send(torch.ones(1), other)
    else:
        dist.recv(torch.ones(1), 0)


def to_late(rank: int, size: int, elements: int) -> None:
    if rank == 0:
        for other in range(1, size):
            dist.recv(torch.ones(elements), other)
    else:
        dist.send(torch.ones(elements), 0)


CALLS: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda rank, size: dist.all_reduce(torch.ones(1)),
    "large": lambda rank, size: dist.all_reduce(torch.ones(1 << 20)),
    "broadcast": lambda rank, size: dist.broadcast(torch.ones(8), 0),
    "objects": lambda rank, size: dist.broadcast_object_list([rank], 0),
    "gather": lambda rank, size: dist.all_gather([torch.ones(1) for _ in range(size)], torch.ones(1)),
    "work": lambda rank, size: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "recv": by_message,
    "send": lambda rank, size: to_late(rank, size, 1 << 17),
    "large send": lambda rank, size: to_late(rank, size, 1 << 20),
}


def sleeps(call: Callable[[], Any], rank: int) -> None:
    """Rank 0 comes late. The others get a signal meanwhile, and the processor time of their processes stays small."""
    handled: list[float] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(time.monotonic()))
    dist.barrier()
    alarm = threading.Timer(LATE_S / 2, os.kill, (os.getpid(), signal.SIGUSR1))
    if rank == 0:
        time.sleep(LATE_S)
    else:
        alarm.start()
    used, begin = time.process_time(), time.monotonic()
    call()
    if rank != 0:
        alarm.join()  # libfabric over TCP may take a whole message before its receiver has come
    used, waited = time.process_time() - used, time.monotonic() - begin
    signal.signal(signal.SIGUSR1, before)
    early = rank == 0 or (bool(handled) and handled[0] - begin < LATE_S * 0.9)
    agree(early and (rank == 0 or used < 0.25 * waited), everyone((waited, used, [at - begin for at in handled])))


@world
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_waiting_takes_no_core_and_signals_are_handled(name: str, rank: int, size: int) -> None:
    sleeps(lambda: CALLS[name](rank, size), rank)


@world
@pytest.mark.min_ranks(2)
def test_a_root_does_not_wait(rank: int, size: int) -> None:
    """A message of 8 bytes leaves it before the others come."""
    dist.barrier()
    begin = time.monotonic()
    if rank != 0:
        time.sleep(LATE_S)
    dist.broadcast(torch.ones(1), 0)
    agree(rank != 0 or time.monotonic() - begin < LATE_S / 2, time.monotonic() - begin)


@world
@pytest.mark.min_ranks(2)
def test_messages_move_while_it_waits(rank: int, size: int) -> None:
    """The last rank comes only after it has received what rank 0, which waits for it, has begun to send through MPI itself."""
    comm, memory = dist.get_comm(), bytearray(40_000_000)
    begin = time.monotonic()
    if rank == 0:
        sent = comm.Isend(memory, size - 1)
    elif rank == size - 1:
        time.sleep(0.1)
        comm.Recv(memory, 0)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        sent.Wait()
    agree(time.monotonic() - begin < 5, time.monotonic() - begin)


@world
@pytest.mark.min_ranks(2)
def test_an_exception_while_it_waits(rank: int, size: int) -> None:
    """The rank has not taken part, so that its group is unusable; another group works on."""
    group = dist.new_group()
    if rank == size - 1:
        before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("in the handler"))
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(pytest.fail.Exception, match="in the handler"):
            dist.all_reduce(torch.ones(1), group=group)
        signal.signal(signal.SIGALRM, before)
        with pytest.raises(dist.errors.GroupFailed, match="has left it half done"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.all_reduce(total := torch.ones(1))
    agree(total.item() == size)


def test_places() -> None:
    """Those of a closed group are free again, and a rank without a place looks at nobody."""
    boards = boards_of(2)
    taken = [boards[0].take(number + 1) for number in range(NUMBERS)]
    assert None not in taken
    assert boards[0].take(NUMBERS + 1) is None
    assert type(of_group(boards[0], NUMBERS + 1, (0, 1), 0)) is Nobody
    assert boards[1].find(0, 7) == taken[6]
    boards[0].give(taken[6])
    assert boards[1].find(0, 7) is None
    assert boards[0].take(300) == taken[6]


@pytest.mark.parametrize("ends", ["comes", "closes the group", "gives up"])
def test_what_ends_the_wait(ends: str) -> None:
    boards = boards_of(2)
    early, late = (of_group(boards[rank], 5, (0, 1), rank) for rank in range(2))
    assert isinstance(early, Attendance)
    done, given_up = threading.Event(), threading.Event()

    def wait() -> None:
        early.wait("all_reduce", (None, 8), 1, given_up.is_set)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not done.wait(0.1)
    if ends == "comes":
        late.words[late.place] = 1 << CALL_BITS
    elif ends == "closes the group":
        late.close()
    else:
        given_up.set()
    thread.join(10)
    assert done.is_set()


def test_a_member_without_a_place_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpicoll._faults.late_ranks.MADE_S", 0.2)
    boards = boards_of(2)
    attendance, begin = of_group(boards[0], 5, (0, 1), 0), time.monotonic()
    for number in range(1, 6):
        attendance.wait("all_reduce", (None, 8), number, lambda: False)
    assert 0.2 < time.monotonic() - begin < 0.6
    late = of_group(boards[1], 5, (0, 1), 1)
    late.words[late.place] = 6 << CALL_BITS
    attendance.wait("all_reduce", (None, 8), 6, lambda: False)
    assert time.monotonic() - begin < 0.7


def test_two_that_look_compare_their_calls() -> None:
    """What differs raises before MPI begins. A call in a quick succession, and one that has gone on, are not compared."""
    boards = boards_of(2)
    own, other = (of_group(boards[rank], 5, (0, 1), rank) for rank in range(2))
    call, longer = (torch.float32, 16), (torch.float32, 20)
    own.words[own.place] = own.word("all_reduce", call, 7)
    for word in (own.word("all_reduce", call, 7), 7 << CALL_BITS, own.word("all_reduce", longer, 8)):
        other.words[other.place] = word
        own.wait("all_reduce", call, 7, lambda: False)
    assert other.word("broadcast", (*call, 0), 7) == 7 << CALL_BITS
    for operation, signature in (("all_reduce", longer), ("all_gather", call)):
        other.words[other.place] = other.word(operation, signature, 7)
        with pytest.raises(DifferentCalls):
            own.wait("all_reduce", call, 7, lambda: False)


@pytest.mark.parametrize(
    ("operation", "root", "own", "needed"),
    [
        ("all_reduce", None, 1, [0, 2]),
        ("broadcast", 2, 1, [2]),
        ("broadcast", 1, 1, []),
        ("scatter", 7, 1, []),  # of another node
        ("gather", 1, 1, [0, 2]),
        ("reduce", 0, 1, []),
        ("scan", None, 1, [0]),
        ("exscan", None, 0, []),
    ],
)
def test_whom_an_operation_needs(operation: str, root: int | None, own: int, needed: list[int]) -> None:
    attendance = of_group(boards_of(3)[own], 5, (0, 1, 2), own)
    assert isinstance(attendance, Attendance)
    assert list(attendance._needed(operation, (None, 8, root))) == needed


def test_a_quick_succession_looks_seldom() -> None:
    boards = boards_of(2)
    attendance, other = (of_group(boards[rank], 5, (0, 1), rank) for rank in range(2))
    other.words[other.place] = 1000 << CALL_BITS
    for _ in range(20):
        attendance.wait("all_reduce", (None, 8), 1, lambda: False)
    assert attendance.due > time.monotonic() - 1
    time.sleep(0.01)
    attendance.wait("all_reduce", (None, 8), 1, lambda: False)
    assert attendance.due == 0
