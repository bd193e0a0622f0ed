"""The end of a program: a rank waits for all others before MPI_Finalize, and answers their questions meanwhile.

One rank has one batch less than the others, or calls sys.exit, and the others wait in a collective that it will never call. They
learn it from its answer (questions.py). A healthy job exchanges only the messages of one barrier.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from time import monotonic

from mpicoll._base.waits import AT_END_S, NEXT_S, SILENT_S
from mpicoll._faults import questions, roll_call
from mpicoll._faults.inquiries import Position, ended
from mpicoll._faults.ledger import counted
from mpicoll._faults.questions import DISMISSED, END, WHERE, Answer, Question
from mpicoll._mpi import abort, library, runtime, survivors
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.library import MPI

MOST_NAMED = 8  # ranks that have not come to their end

_all_come = False  # True: all ranks of MPI.COMM_WORLD have made a world, and so will call `leave`


def expect_all() -> None:
    """Records that there is a world of all ranks of MPI.COMM_WORLD. Each of these ranks calls this.

    A job may have only worlds of some ranks, or RPC alone. Some ranks would then wait in `leave` for others that never come.
    """
    global _all_come
    _all_come = True


def leave(begun: Callable[[str], int], meanwhile: Callable[[], object], state: Callable[[int], str]) -> None:
    """Waits until all ranks of MPI.COMM_WORLD have called this, and answers meanwhile (collective, at the program's end).

    After some seconds, the lowest rank that waits says which ranks have not come. It asks all others: those that wait, too,
    answer.

    Args:
        begun: Returns the number of collectives that this rank has begun on the group of a name.
        meanwhile: Called again and again until then.
        state: Returns what is known of a rank's process, in words; empty: nothing.
    """
    comm, lowest = runtime.world_comm(), True  # as far as this rank knows
    rank, size = (0, 1) if comm is None or runtime.finalized() else (comm.Get_rank(), comm.Get_size())

    def said(source: int, question: Question) -> Answer:
        nonlocal lowest
        if question.kind == DISMISSED:
            abort.die("this rank has ended, and other ranks wait for it; it counts as dead")
        if question.kind == END:
            lowest = lowest and source > rank
            return question.answered(True)
        group, _ = question.about
        number = begun(group)
        left = f"whose program has ended (after {counted(number)} on this group)"
        return question.answered(Position(group, number, ended(number), left))

    if runtime.finalized() or (survivors.possible() and _leave_survivors(said, meanwhile)):
        return
    if not _all_come or comm is None or size == 1:
        return
    others, come = [other for other in range(size) if other != rank], set[int]()
    asks, names = monotonic() + AT_END_S + rank * NEXT_S, math.inf
    barrier, backoff = comm.Ibarrier(), Backoff()
    while not barrier.Test():
        questions.serve(WHERE, said)
        come.update(source for source, answer in questions.answers(WHERE) if answer.kind == END)
        roll_call.turn_away(comm)
        meanwhile()
        now = monotonic()
        if now > asks and lowest:
            asks, names = math.inf, now + SILENT_S
            questions.ask(others, Question(END))
        if now > names and lowest:
            names = math.inf
            words = [f"rank {other}{state(other)}" for other in others if other not in come]
            more = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
            what = f"has come to the end of its program and waits for {'; '.join(words[:MOST_NAMED])}{more}"
            print(f"mpicoll: rank {rank} of {size} {what}", file=sys.stderr, flush=True)
        backoff.pause()


def _leave_survivors(said: Callable[[int, Question], Answer | None], meanwhile: Callable[[], object]) -> bool:
    """`leave` for a job that goes on when a rank dies. Returns False if not all ranks of the last world will call it."""
    base = survivors.root()
    if base == MPI.COMM_WORLD and not _all_come:
        return False

    def answer_others() -> None:
        meanwhile()
        if runtime.world_comm() is not None and not library.dead_processes:
            questions.serve(WHERE, said)

    survivors.meet(base, goes_on=False, meanwhile=answer_others)
    return True
