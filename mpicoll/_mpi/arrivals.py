"""Messages whose size is not known before: finds and receives them. And messages that their sender does not wait for.

# Note [No matched probes]
# Improbe and Mrecv keep other threads from a message that one has found, but not every transport has them. Over libfabric, Mrecv
# of Open MPI 5.0.11 raises MPI_ERR_OTHER while the rank sends as well (mtl/ofi, the way to Slingshot, Omni-Path and EFA). So a
# tag has one consumer at a time, which calls Iprobe and then receives from the sender that it has found. mpi4py's own receive
# of objects (`comm.recv`) uses matched probes. For messages of the user, channels have a lock, `posting`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from mpicoll._mpi import runtime, survivors
from mpicoll._mpi.library import MPI


class Arrived(NamedTuple):
    """A message that has come and is not received yet. ``source``: the rank of its sender in the communicator."""

    source: int
    tag: int
    nbytes: int

    def received(self, comm: MPI.Intracomm) -> bytearray:
        """Receives the message."""
        content = bytearray(self.nbytes)
        comm.Recv([content, self.nbytes, MPI.BYTE], self.source, self.tag)
        return content


def first(comm: MPI.Intracomm, src: int, tag: int) -> Arrived | None:
    """The first message from ``src`` (or ANY_SOURCE) with this tag (or ANY_TAG); None: none has come."""
    status = MPI.Status()
    if not comm.Iprobe(src, tag, status):
        return None
    return Arrived(status.Get_source(), status.Get_tag(), status.Get_elements(MPI.BYTE))


def objects(comm: MPI.Intracomm, tag: int) -> Iterator[tuple[int, Any]]:
    """Receives the objects that have come with this tag, each with the rank of its sender, which has called `send`."""
    while (arrived := first(comm, MPI.ANY_SOURCE, tag)) is not None:
        yield arrived.source, pickle.loads(arrived.received(comm))


def send(comm: MPI.Intracomm, content: object, ranks: Iterable[int], tag: int) -> int:
    """Sends an object to each of these ranks, for `objects`. Returns its size in bytes. The caller holds the lock."""
    data = pickle.dumps(content)
    keep([comm.Isend([data, len(data), MPI.BYTE], rank, tag) for rank in ranks], data)
    return len(data)


def keep(requests: list[MPI.Request], memory: object = None) -> None:
    """Keeps messages that nobody waits for, and their memory, until they have ended. The caller holds the lock."""
    in_flight, under_way = runtime.process.in_flight, [(requests, memory)]
    try:
        with suppress(IndexError):  # all have been tested
            while True:
                under_way.append(in_flight.pop())  # no other thread has it now
                with survivors.Tolerated():
                    if _ended(under_way[-1][0]):
                        under_way.pop()
    finally:
        in_flight.extend(under_way)


def _ended(requests: list[MPI.Request]) -> bool:
    return bool(MPI.Request.Testall(requests))
