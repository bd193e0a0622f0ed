"""Lets a rank whose program has ended tell this to the ranks that still wait for it.

One rank has one batch less than the others, or calls sys.exit, and the others wait in a collective that it will never call.
Without a handshake it would wait in MPI_Finalize, the others in MPI, and no rank would know which rank is missing. So:

    the rank that has come to its end              a rank that has been blocked for some time
    waits here for the others to come too,         [1] asks the other ranks, one after the other
    before MPI_Finalize, and meanwhile             [3] if the answer is smaller than its own count, that rank will
    [2] answers: the number of collectives             never come (the watchdog says so and ends the job)
        that it has begun on that group

A rank that is still working does not answer; the questions wait in MPI. So a healthy job exchanges only the messages of one
barrier here, at its end.
"""

from __future__ import annotations

from collections.abc import Callable

from mpicoll._mpi import abort, library, runtime, survivors
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.library import MPI

QUESTION, ANSWER = 1, 2  # tags on the runtime's own communicator
DISMISSED = ""  # a question that names no group: the rank counts as dead from now on

_all_come = False  # True: all ranks of MPI.COMM_WORLD have made a world, and so will call `leave`
_sent: list[MPI.Request] = []  # questions and answers in flight


def expect_all() -> None:
    """Records that there is a world of all ranks of MPI.COMM_WORLD. Each of these ranks calls this.

    A job may have only worlds of some ranks, or RPC alone. Some ranks would then wait in `leave` for others that never come.
    """
    global _all_come
    _all_come = True


def possible() -> bool:
    """True if the ranks of this world can ask each other: the world is MPI.COMM_WORLD, not a communicator of the user."""
    world = runtime.current()
    return (
        world is not None
        and not survivors.lost()
        and world.size > 1
        and runtime.world_comm() is not None
        and world.base == MPI.COMM_WORLD
    )


def ask(rank: int, group: str) -> None:
    """[1] Asks one rank of the world how many collectives it has begun on this group. It answers only once it has ended."""
    comm, world = runtime.world_comm(), runtime.current()
    assert comm is not None
    assert world is not None
    with world.lock, survivors.tolerated():
        _sent[:] = [request for request in _sent if not request.Test()]
        _sent.append(comm.isend(group, rank, QUESTION))


def dismiss(rank: int) -> None:
    """Tells a rank that has ended, and that others wait for, to die, so that they get PeerLost."""
    ask(rank, DISMISSED)


def answers() -> list[tuple[int, str, int]]:
    """[3] The answers that have arrived: (rank of the world, group, number of collectives that it has begun on the group).

    Only one thread calls this.
    """
    comm, world = runtime.world_comm(), runtime.current()
    assert comm is not None
    assert world is not None
    received = []
    with world.lock, survivors.tolerated():
        status = MPI.Status()
        while comm.iprobe(MPI.ANY_SOURCE, ANSWER, status):
            group, begun = comm.recv(source=status.source, tag=ANSWER)
            received.append((status.source, group, begun))
    return received


def leave(begun: Callable[[str], int]) -> None:
    """[2] Waits until all ranks of MPI.COMM_WORLD have called this, and answers meanwhile (collective, at the program's end).

    ``begun`` returns the number of collectives that this rank has begun on the group of a name.
    """
    comm = runtime.world_comm()
    if runtime.finalized() or (survivors.possible() and _leave_survivors(begun)):
        return
    if not _all_come or comm is None or comm.Get_size() == 1:
        return
    barrier, backoff = comm.Ibarrier(), Backoff()
    while not barrier.Test():
        _answer(comm, begun)
        backoff.pause()


def _leave_survivors(begun: Callable[[str], int]) -> bool:
    """`leave` for a job that goes on when a rank dies. Returns False if not all ranks of the last world will call it."""
    base = survivors.root()
    if base == MPI.COMM_WORLD and not _all_come:
        return False

    def answer() -> None:
        comm = runtime.world_comm()
        if comm is not None and not library.dead_processes:
            with survivors.tolerated():
                _answer(comm, begun)

    survivors.meet(base, goes_on=False, meanwhile=answer)
    return True


def _answer(comm: MPI.Intracomm, begun: Callable[[str], int]) -> None:
    status = MPI.Status()
    if comm.iprobe(MPI.ANY_SOURCE, QUESTION, status):
        group = comm.recv(source=status.source, tag=QUESTION)
        if group == DISMISSED:
            abort.die(f"rank {comm.Get_rank()} has ended while other ranks wait for it; it counts as dead")
        _sent.append(comm.isend((group, begun(group)), status.source, ANSWER))
