"""The exit handshake: a rank whose program has ended tells the ranks that still wait for it.

One rank has a batch less than the others, or calls sys.exit, and the others wait in a collective that it will never call.
Without the handshake it would wait in MPI_Finalize, the others in MPI, and no rank could name the culprit. So:

    the rank whose program has ended               a rank that has been blocked for some time
    waits here for all ranks before                [1] asks the other ranks, one after the other
    MPI_Finalize, and meanwhile                    [3] if the answer is smaller than its own count, that rank will never
    [2] answers: the number of collectives             call the collective (the watchdog says so and ends the job)
        that it has begun on that group

A rank that is still at work does not answer; the questions wait in MPI. In a job without errors, the only messages are those of
one barrier at its end.
"""

from __future__ import annotations

from collections.abc import Callable

from mpicoll._mpi import runtime
from mpicoll._mpi.library import MPI

QUESTION, ANSWER = 1, 2  # tags on the runtime's own communicator

_all_come = False  # all ranks of MPI.COMM_WORLD have made a world, and so will call `leave`
_sent: list[MPI.Request] = []  # questions and answers in flight


def expect_all() -> None:
    """Notes that a world of all ranks of MPI.COMM_WORLD exists. Each of them calls this.

    Without it `leave` does not wait: in a job with worlds of some ranks only, or with RPC only, not every rank calls `leave`.
    """
    global _all_come
    _all_come = True


def possible() -> bool:
    """Returns whether the ranks of this world can ask each other: it is MPI.COMM_WORLD, not a communicator of the user."""
    world = runtime.current()
    return world is not None and world.size > 1 and runtime.world_comm() is not None and world.base == MPI.COMM_WORLD


def ask(rank: int, group: str) -> None:
    """[1] Asks one rank how many collectives it has begun on this group. It answers after its program has ended."""
    comm, world = runtime.world_comm(), runtime.current()
    assert comm is not None
    assert world is not None
    with world.lock:
        _keep(comm.isend(group, rank, QUESTION))


def answers() -> list[tuple[int, str, int]]:
    """[3] Returns the answers so far: rank, group, and number of collectives begun on it. Called by one thread at a time."""
    comm, world = runtime.world_comm(), runtime.current()
    assert comm is not None
    assert world is not None
    received = []
    with world.lock:
        status = MPI.Status()
        while comm.iprobe(MPI.ANY_SOURCE, ANSWER, status):
            group, begun = comm.recv(source=status.source, tag=ANSWER)
            received.append((status.source, group, begun))
    return received


def leave(begun: Callable[[str], int], pause: Callable[[], None]) -> None:
    """[2] Waits until all ranks of MPI.COMM_WORLD have called this, and answers meanwhile (collective, at the end of a program).

    Args:
        begun: Returns the number of collectives that this rank has begun on the group of this name.
        pause: Backs off; called after each look.
    """
    comm = runtime.world_comm()
    if not _all_come or comm is None or comm.Get_size() == 1 or runtime.finalized():
        return
    barrier, status = comm.Ibarrier(), MPI.Status()
    while not barrier.Test():
        if comm.iprobe(MPI.ANY_SOURCE, QUESTION, status):
            group = comm.recv(source=status.source, tag=QUESTION)
            _keep(comm.isend((group, begun(group)), status.source, ANSWER))
        pause()


def _keep(request: MPI.Request) -> None:
    """Keeps a message until it has left, and drops those that have."""
    _sent[:] = [sent for sent in _sent if not sent.Test()]
    _sent.append(request)
