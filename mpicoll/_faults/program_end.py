"""The end of a program: a rank waits for its collectives, then for all others before MPI_Finalize, and answers their questions.

One rank has one batch less than the others, or calls sys.exit, and the others wait in a collective that it will never call. They
learn it from its answer (questions.py). A healthy job exchanges only the messages of one barrier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpicoll._base import log
from mpicoll._base.waits import EXIT_S
from mpicoll._faults import questions, roll_call
from mpicoll._faults.call_comparison import counted
from mpicoll._faults.inquiries import Position, ended
from mpicoll._faults.questions import DISMISSED, WHERE, Answer, Question
from mpicoll._mpi import abort, library, runtime, survivors
from mpicoll._mpi.library import MPI

MOST_NAMED = 8  # ranks that have not come to their end

_all_come = False  # True: all ranks of MPI.COMM_WORLD have made a world, and so will call `leave`


def expect_all() -> None:
    """Records that there is a world of all ranks of MPI.COMM_WORLD. Each of these ranks calls this.

    A job may have only worlds of some ranks, or RPC alone. Some ranks would then wait in `leave` for others that never come.
    """
    global _all_come
    _all_come = True


def end_collectives(groups: Iterable[Any]) -> None:
    """Waits some seconds for the collectives that this rank has started, before its threads end. Else it ends the job."""
    deadline = time.monotonic() + EXIT_S
    for group in groups:
        if not group.queue.close(max(0.0, deadline - time.monotonic())):
            log.say(
                f"rank {group.rank} leaves while a collective that it has started on group {group.name!r} has not ended after "
                f"{EXIT_S:g} s: not every rank has called it"
            )
            abort.abort("exit with a collective under way")


def leave(begun: Callable[[str], int], meanwhile: Callable[[], object], state: Callable[[int], str]) -> None:
    """Waits until all ranks of MPI.COMM_WORLD have called this, and answers meanwhile (collective, at the program's end).

    After some seconds, the lowest rank that waits says which ranks have not come: it asks all others, and those that wait answer.

    Args:
        begun: Returns the number of collectives that this rank has begun on the group of a name.
        meanwhile: Called again and again until then.
        state: Returns what is known of a rank's process, in words; empty: nothing.
    """
    comm = runtime.world_comm()

    def said(source: int, question: Question) -> Answer:
        if question.kind == DISMISSED:
            abort.die("this rank has ended, and other ranks wait for it; it counts as dead")
        group, _ = question.about
        number = begun(group)
        left = f"whose program has ended (after {counted(number)} on this group)"
        return question.answered(Position(group, number, ended(number), left))

    def answer() -> None:
        questions.serve(WHERE, said)
        questions.answers(WHERE)
        meanwhile()

    def named(missing: Sequence[int]) -> str:
        words = [f"rank {other}{state(other)}" for other in missing[:MOST_NAMED]]
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        return f"has come to the end of its program and waits for {'; '.join(words)}{more}"

    if runtime.finalized() or (survivors.possible() and _leave_survivors(said, meanwhile)):
        return
    if _all_come and comm is not None and comm.Get_size() > 1:
        roll_call.at_end(comm, answer, named)


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
