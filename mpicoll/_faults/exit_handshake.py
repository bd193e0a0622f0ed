"""Questions between ranks about a group: the ranks that wait ask, and running ranks and ended ones answer.

One rank has one batch less than the others, or calls sys.exit, and the others wait in a collective that it will never call. Or a
rank of another node, whose calls cannot be seen from here, is late. So:

    a rank that has been blocked for some time [1] asks the ranks that it waits for, a few in each second
    a rank that runs                           [2] answers within a second, from the thread of its watchdog
    a rank that has come to its end            [2] answers as well, while it waits in `leave` for the others to come too,
                                                   before MPI_Finalize
    the rank that has asked                    [3] knows from the answer whether that rank is late, or will never come

A rank that is stopped, or has been lost, does not answer. A healthy job exchanges only the messages of one barrier, at its end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import monotonic
from typing import NamedTuple

from mpicoll._base.facts import Facts
from mpicoll._base.waits import AT_END_S, NEXT_S, SILENT_S
from mpicoll._faults import roll_call
from mpicoll._faults.ledger import PROGRAM_ENDED, counted
from mpicoll._mpi import abort, arrivals, library, runtime, survivors
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.library import MPI

QUESTION, ANSWER = 1, 2  # tags on the runtime's own communicator
DISMISSED = -1  # instead of a place in the order: the rank counts as dead from now on
SHOW = -2  # the rank shows where its program is
END = -3  # the rank answers with ``left`` if it has come to its end; ``about``: the rank that asks
MOST_NAMED = 8  # ranks that have not come to their end


class Question(NamedTuple):
    """``group``: its name. ``number``: a place in its order of collectives; 0: none; or DISMISSED or SHOW.

    ``about``: what the asking rank waits for, by a number of its own. It comes back with the answer, which may come late.
    """

    group: str
    number: int = 0
    about: int = 0


class Answer(NamedTuple):
    """What a rank says of itself.

    Attributes:
        group: The name of the group.
        begun: Number of collectives that the rank has begun on it.
        words: What it did last.
        left: Why the rank will begin no more, in words that follow its number; empty: it may begin more.
        call: Its call at the place that was asked for; None if it has not come there.
        about: Of the question.
        ending: How the rank has left the group (`GroupState.ending`); empty: it has not.
    """

    group: str
    begun: int
    words: str
    left: str = ""
    call: Facts | None = None
    about: int = 0
    ending: str = ""


_all_come = False  # True: all ranks of MPI.COMM_WORLD have made a world, and so will call `leave`


def expect_all() -> None:
    """Records that there is a world of all ranks of MPI.COMM_WORLD. Each of these ranks calls this.

    A job may have only worlds of some ranks, or RPC alone. Some ranks would then wait in `leave` for others that never come.
    """
    global _all_come
    _all_come = True


def ended(collectives: int) -> str:
    """What is said of a rank at its end, after so many collectives on a group."""
    return f"{PROGRAM_ENDED}, after {counted(collectives)} on this group"


def possible() -> bool:
    """True if the ranks of this world can ask each other: the world is MPI.COMM_WORLD, not a communicator of the user."""
    world = runtime.current()
    if world is None or world.size == 1 or survivors.lost():
        return False
    return runtime.world_comm() is not None and world.base == MPI.COMM_WORLD


@contextmanager
def _world_comm() -> Iterator[MPI.Intracomm]:
    """The communicator of all ranks, under the lock. An MPI error inside is dropped if a rank has died."""
    comm, world = runtime.world_comm(), runtime.current()
    assert comm is not None
    with nullcontext() if world is None else world.lock, survivors.Tolerated():
        yield comm


def ask(rank: int, question: Question) -> None:
    """[1] Sends a question to one rank of the world."""
    with _world_comm() as comm:
        arrivals.send(comm, tuple(question), [rank], QUESTION)


def answers() -> list[tuple[int, Answer]]:
    """[3] Returns the answers that have arrived, with the ranks of the world that they come from. Only one thread calls this."""
    received = list[tuple[int, Answer]]()
    with _world_comm() as comm:
        received.extend(_received(comm))
    return received


def answer(said: Callable[[Question], Answer | None]) -> None:
    """[2] Answers the questions that have arrived. ``said`` returns this rank's answer; None: it has none.

    Only one thread calls this at a time.
    """
    with _world_comm() as comm:
        _answer(comm, said)


def leave(begun: Callable[[str], int], meanwhile: Callable[[], object], state: Callable[[int], str]) -> None:
    """[2] Waits until all ranks of MPI.COMM_WORLD have called this, and answers meanwhile (collective, at the program's end).

    After some seconds, the lowest rank that waits says which ranks have not come. It asks all others: those that wait, too,
    answer.

    Args:
        begun: Returns the number of collectives that this rank has begun on the group of a name.
        meanwhile: Called again and again until then.
        state: Returns what is known of a rank's process, in words; empty: nothing.
    """
    comm, lowest = runtime.world_comm(), True  # as far as this rank knows
    rank, size = (0, 1) if comm is None or runtime.finalized() else (comm.Get_rank(), comm.Get_size())

    def said(question: Question) -> Answer:
        nonlocal lowest
        if question.number == DISMISSED:
            abort.die("this rank has ended, and other ranks wait for it; it counts as dead")
        if question.number == END:
            lowest = lowest and question.about > rank
        number = begun(question.group)
        left = f"whose program has ended (after {counted(number)} on this group)"
        return Answer(question.group, number, ended(number), left, about=question.about)

    if runtime.finalized() or (survivors.possible() and _leave_survivors(said, meanwhile)):
        return
    if not _all_come or comm is None or size == 1:
        return
    others, come = [other for other in range(size) if other != rank], set[int]()
    asks, names = monotonic() + AT_END_S + rank * NEXT_S, math.inf
    barrier, backoff = comm.Ibarrier(), Backoff()
    while not barrier.Test():
        _answer(comm, said)
        come.update(source for source, answer in _received(comm) if answer.left and not answer.group)
        roll_call.turn_away(comm)
        meanwhile()
        now = monotonic()
        if now > asks and lowest:
            asks, names = math.inf, now + SILENT_S
            arrivals.send(comm, tuple(Question("", END, rank)), others, QUESTION)
        if now > names and lowest:
            names = math.inf
            words = [f"rank {other}{state(other)}" for other in others if other not in come]
            more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
            what = f"has come to the end of its program and waits for {'; '.join(words[:MOST_NAMED])}{more}"
            print(f"mpicoll: rank {rank} of {size} {what}", file=sys.stderr, flush=True)
        backoff.pause()


def _leave_survivors(said: Callable[[Question], Answer | None], meanwhile: Callable[[], object]) -> bool:
    """`leave` for a job that goes on when a rank dies. Returns False if not all ranks of the last world will call it."""
    base = survivors.root()
    if base == MPI.COMM_WORLD and not _all_come:
        return False

    def answer_others() -> None:
        meanwhile()
        comm = runtime.world_comm()
        if comm is not None and not library.dead_processes:
            with survivors.Tolerated():
                _answer(comm, said)

    survivors.meet(base, goes_on=False, meanwhile=answer_others)
    return True


def _received(comm: MPI.Intracomm) -> list[tuple[int, Answer]]:
    return [(source, Answer(*answer)) for source, answer in arrivals.objects(comm, ANSWER)]


def _answer(comm: MPI.Intracomm, said: Callable[[Question], Answer | None]) -> None:
    for source, question in arrivals.objects(comm, QUESTION):
        found = said(Question(*question))
        if found is not None:
            arrivals.send(comm, tuple(found), [source], ANSWER)
