"""Questions between ranks, and the answers. Each kind is a row: add one for a new question.

    kind        who asks                                    who answers                     what
    WHERE       a watchdog, for a call that has waited      watchdog, `leave`               a `Position` in the group ``about``
    SHOW        a watchdog that is about to end the job     watchdog: no answer; `leave`    it shows where its program is
    DISMISSED   a watchdog, in a job that goes on           `leave`: no answer              it counts as dead, and ends
    KEYS        any thread, of the store of its world       the store of rank 0             what the method returns, or its error

A rank answers within a second, or, of the store, at once. One that is stopped, or lost, does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from mpicoll._mpi import arrivals, runtime, survivors
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

WHERE, SHOW, DISMISSED, KEYS = "where", "show", "dismissed", "keys"
# Tags of the questions; the answers have the next one. One thread at a time receives what has a tag.
TAGS = {WHERE: 1, SHOW: 1, DISMISSED: 1, KEYS: 3}


class Answer(NamedTuple):
    """The answer to the question of this number."""

    kind: str
    number: int
    value: Any


class Question(NamedTuple):
    """``number``: of the asking rank's own. It comes back with the answer, which may come late."""

    kind: str
    about: Any = None
    number: int = 0

    def answered(self, value: Any) -> Answer:
        return Answer(self.kind, self.number, value)


def possible() -> bool:
    """True if the ranks of this world can ask each other: the world is MPI.COMM_WORLD, not a communicator of the user."""
    world = runtime.current()
    if world is None or world.size == 1 or survivors.lost():
        return False
    return runtime.world_comm() is not None and world.base == MPI.COMM_WORLD


def ask(ranks: Iterable[int], question: Question, mpi: Runtime | None = None) -> int:
    """Sends a question to some ranks. ``mpi``: the world of their numbers; None: MPI.COMM_WORLD. Returns its size in bytes."""
    with _comm(mpi) as comm:
        return arrivals.send(comm, tuple(question), ranks, TAGS[question.kind])
    return 0  # an error was dropped


def serve(kind: str, said: Callable[[int, Question], Answer | None], mpi: Runtime | None = None) -> None:
    """Answers the questions that have come, of all kinds with the same tag. One thread at a time calls this.

    ``said`` returns the answer to a question of a rank; None: there is none, or `answer` sends it later.
    """
    with _comm(mpi) as comm:
        for source, content in arrivals.objects(comm, TAGS[kind]):
            if (found := said(source, Question(*content))) is not None:
                answer(source, found, mpi)


def answer(rank: int, found: Answer, mpi: Runtime | None = None) -> None:
    """Sends an answer."""
    with _comm(mpi) as comm:
        arrivals.send(comm, tuple(found), [rank], TAGS[found.kind] + 1)


def answers(kind: str, mpi: Runtime | None = None) -> list[tuple[int, Answer]]:
    """Returns the answers that have come, of all kinds with the same tag, with their ranks. One thread at a time calls this."""
    received = list[tuple[int, Answer]]()
    with _comm(mpi) as comm:
        received.extend((source, Answer(*content)) for source, content in arrivals.objects(comm, TAGS[kind] + 1))
    return received


@contextmanager
def _comm(mpi: Runtime | None) -> Iterator[MPI.Intracomm]:
    """The communicator of a world, under the lock. An MPI error inside is dropped if a rank has died."""
    world, comm = mpi or runtime.current(), runtime.world_comm() if mpi is None else mpi.comm
    assert comm is not None
    with nullcontext() if world is None else world.lock, survivors.Tolerated():
        yield comm
