"""Messages of any length between the processes of one communicator, received in the order in which they arrive.

A message is an envelope and any number of memory blocks. The envelope describes the blocks, which go straight from the sender's
memory into the receiver's memory. The blocks of a message travel in order, under a tag that belongs to this message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mpicoll._mpi import arrivals, bell, library, survivors
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.datatypes import spec
from mpicoll._mpi.errors import not_made
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

ENVELOPE = 0  # tag
FIRST_TAG, TAGS = 1, 1 << 20  # blocks of a sender's message n have tag FIRST_TAG + n % TAGS; TAG_UB of every MPI is larger

Block = tuple[int, int]  # address, bytes
# Note [Memory that MPI may still use]
# A message to or from a rank that has left never ends, and MPI may still read or write its memory, even after this process has
# dropped the mailbox. Such memory is kept until the requests have ended, which may be never. Its size is bounded by the messages
# in flight when the rank left: afterwards no message is sent to that rank or received from it.


@dataclass
class Sum:
    """A sum over all ranks, in progress. Keeps the memory alive that MPI still uses, because mpi4py does not."""

    requests: list[MPI.Request]
    summand: bytes
    total: bytearray

    def numbers(self) -> tuple[int, ...]:
        """The sums; valid once the requests have ended."""
        return struct.unpack(f"<{len(self.total) // 8}q", self.total)


class Mailbox:
    """One process's end of the messages between all ranks. Making it is collective over the runtime's ranks.

    Any thread may call any method. Making it raises CommunicationError if MPI has no communicator left.

    Attributes:
        dead: Ranks whose processes have died, in the order in which this was noticed. Only an MPI that survives a death reports
            it: Open MPI under ``mpiexec --with-ft ulfm``. Other MPIs end the job.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock
        made = ExitStack()  # frees what has been made
        with runtime.lock:
            try:
                self._comm = runtime.comm.Dup()
                made.callback(self._comm.Free)
                self._agreement = runtime.comm.Dup()
            except MPI.Exception as raw:
                made.close()
                raise not_made(raw, "init_rpc") from raw
        self.dead: list[int] = []

    def send(self, to: int, envelope: bytes | bytearray, blocks: Sequence[Block], number: int) -> list[MPI.Request]:
        """Posts a message, number ``number`` of this sender. Its memory must stay unchanged until the requests have `ended`."""
        with self._lock:
            requests = [self._comm.Isend([envelope, len(envelope), MPI.BYTE], to, ENVELOPE)]
            tag = FIRST_TAG + number % TAGS
            requests += [self._comm.Isend(spec(*block), to, tag) for block in blocks]
        bell.services.wake(to)
        return requests

    def take(self) -> tuple[int, bytearray] | None:
        """The sender and the envelope of a message that has arrived; None if there is none. One thread at a time calls this."""
        with self._lock:
            try:
                arrived = arrivals.first(self._comm, MPI.ANY_SOURCE, ENVELOPE)
                return None if arrived is None else (arrived.source, arrived.received(self._comm))
            except MPI.Exception as error:
                self._bury(error)
        return None

    def receive(self, source: int, blocks: Sequence[Block], number: int) -> list[MPI.Request]:
        """Posts the receives for the blocks of an envelope that `take` returned."""
        tag = FIRST_TAG + number % TAGS
        with self._lock:
            try:
                return [self._comm.Irecv(spec(*block), source, tag) for block in blocks]
            except MPI.Exception as error:
                self._bury(error)
                return []

    def ended(self, requests: list[MPI.Request], tests: int = 1) -> bool:
        """True once all requests have ended, or if a process has died, so that they may never end.

        Each of the ``tests`` moves the messages forward by one piece of memory.
        """
        with self._lock:
            try:
                return any(MPI.Request.Testall(requests) for _ in range(tests))
            except MPI.Exception as error:
                self._bury(error)
                return True

    def _bury(self, error: MPI.Exception) -> None:
        """Records which processes have died, so that the others can continue. Raises the error if it has another cause."""
        try:
            self._comm.Ack_failed()  # receives from any source work again
            gone = survivors.failed(self._comm)
        except (MPI.Exception, NotImplementedError):  # an MPI without these calls
            gone = ()
        self.dead += [rank for rank in gone if rank not in self.dead]
        if not self.dead:
            raise error
        library.dead_processes = True  # see Note [After a process has died]

    def begin_sum(self, numbers: Sequence[int]) -> Sum:
        """Starts adding up these numbers over all ranks (collective). The sums are wrong if any process has died."""
        summand, total = struct.pack(f"<{len(numbers)}q", *numbers), bytearray(8 * len(numbers))
        with self._lock:
            try:
                parts = [summand, len(numbers), MPI.INT64_T], [total, len(numbers), MPI.INT64_T]
                requests = [self._agreement.Iallreduce(*parts, MPI.SUM)]
            except MPI.Exception as error:
                self._bury(error)
                requests = []
        return Sum(requests, summand, total)

    def keep(self, requests: list[MPI.Request], memory: object) -> None:
        """Keeps the memory of requests that no thread will wait for; see Note [Memory that MPI may still use]."""
        with self._lock:
            arrivals.keep(requests, memory)

    def meet(self) -> None:
        """Returns once every rank has called this (collective). Other threads run meanwhile."""
        total, backoff = self.begin_sum([0]), Backoff(spin_s=0.0, yield_s=0.0)
        while not self.ended(total.requests):
            backoff.pause()

    def exchange(self, value: object) -> list[object]:
        """The values of all ranks (collective, blocking). Called before any other thread uses the mailbox."""
        return self._agreement.allgather(value)

    def free(self) -> None:
        """Frees the communicators (collective)."""
        with self._lock:
            self._comm.Free()
            self._agreement.Free()
