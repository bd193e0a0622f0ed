"""How a rank whose program has come to its end tells those that still wait for it.

One rank has a batch less than the others, or calls sys.exit, and the others wait in a collective that it will never call.
It would sit in MPI_Finalize, they in MPI, and nobody would know of whom to complain. So:

    the rank that has come to its end              a rank that has been blocked for some time
    waits here for the others to come too,         [1] asks the other ranks, one after the other
    before MPI_Finalize, and meanwhile             [3] if the answer is smaller than its own count, that rank will
    [2] answers: the number of collectives             never come (the watchdog says so and ends the job)
        that it has begun on that group

A rank that is still at work answers nothing; the questions wait in MPI. So a job that is well exchanges no message here but
those of one barrier, at its end.
"""

from __future__ import annotations

from collections.abc import Callable

from mpicoll._mpi import runtime
from mpicoll._mpi.library import MPI

QUESTION, ANSWER = 1, 2  # tags on the runtime's own communicator

_all_come = False  # all ranks of MPI.COMM_WORLD have made a world, and so will come to `leave`
_sent: list[MPI.Request] = []  # questions and answers on their way


def expect_all() -> None:
    """Notes that there is a world of all ranks of MPI.COMM_WORLD (called by each of them).

    Where worlds of some ranks, or RPC alone, are all that a job has, some ranks would wait here for others that never come.
    """
    global _all_come
    _all_come = True


def possible() -> bool:
    """Whether the ranks of this world can ask each other: it is MPI.COMM_WORLD, and not a communicator of the user's own."""
    there = runtime.current()
    return there is not None and there.size > 1 and runtime.world_comm() is not None and there.base == MPI.COMM_WORLD


def ask(rank: int, group: str) -> None:
    """[1] Asks one rank of the world, if it should have left, how far it has come on this group."""
    comm, there = runtime.world_comm(), runtime.current()
    assert comm is not None
    assert there is not None
    with there.lock:
        _sent[:] = [request for request in _sent if not request.Test()]
        _sent.append(comm.isend(group, rank, QUESTION))


def answers() -> list[tuple[int, str, int]]:
    """[3] What has come back: rank of the world, group, number of collectives that it has begun there; one thread calls."""
    comm, there = runtime.world_comm(), runtime.current()
    assert comm is not None
    assert there is not None
    found = []
    with there.lock:
        status = MPI.Status()
        while comm.iprobe(MPI.ANY_SOURCE, ANSWER, status):
            group, begun = comm.recv(source=status.source, tag=ANSWER)
            found.append((status.source, group, begun))
    return found


def leave(begun: Callable[[str], int], pause: Callable[[], None]) -> None:
    """[2] Waits for all ranks of MPI.COMM_WORLD to come here, and answers meanwhile (collective, at the end of the program).

    Args:   begun: for the name of a group, how many collectives this rank has begun on it. pause: backs off.
    """
    comm = runtime.world_comm()
    if not _all_come or comm is None or comm.Get_size() == 1 or runtime.finalized():
        return
    barrier, status = comm.Ibarrier(), MPI.Status()
    while not barrier.Test():
        if comm.iprobe(MPI.ANY_SOURCE, QUESTION, status):
            group = comm.recv(source=status.source, tag=QUESTION)
            _sent.append(comm.isend((group, begun(group)), status.source, ANSWER))
        pause()
