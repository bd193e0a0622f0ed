"""Messages of any length between the processes of one communicator, taken in whatever order they come.

A message is an envelope, which says what follows, and any number of memory blocks, which go straight from the sender's memory
into the receiver's. Envelopes are matched by Improbe and Mrecv, so that several threads may look for them; the blocks of a
message travel under a tag of its own, in their order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mpicoll._mpi import library
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.datatypes import spec
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

ENVELOPE = 0  # tag
FIRST_TAG, TAGS = 1, 1 << 20  # of the blocks: message n of a sender has tag FIRST_TAG + n % TAGS; any MPI's TAG_UB is larger

Block = tuple[int, int]  # address, bytes
# Note [Memory that MPI may still use]
# A message to or from a rank that has left never ends, and MPI may still read or write its memory, even after this process has
# dropped the mailbox. Such memory is kept until the requests have ended, which may be never. It is bounded by what was in
# flight when the rank left: nothing is sent to it, and nothing received from it, afterwards.
_kept: list[tuple[list[MPI.Request], object]] = []


@dataclass
class Sum:
    """Numbers that are being added up. mpi4py keeps no memory alive that MPI still reads, so this does."""

    requests: list[MPI.Request]
    given: bytes
    total: bytearray

    def numbers(self) -> tuple[int, ...]:
        """Once the requests have ended."""
        return struct.unpack(f"<{len(self.total) // 8}q", self.total)


class Mailbox:
    """One process's end (making it is collective over the runtime's ranks). Every method may be called by any thread.

    ``dead``: ranks whose processes have died, as they were noticed. Only an MPI that survives that tells of it: Open MPI under
    ``mpiexec --with-ft ulfm``; others end the job.
    """

    def __init__(self, there: Runtime) -> None:
        self._lock = there.lock
        with there.lock:
            self._comm = there.comm.Dup()
            self._agreement = there.comm.Dup()
        self._status = MPI.Status()
        self.dead: list[int] = []

    def send(self, to: int, envelope: bytes | bytearray, blocks: Sequence[Block], number: int) -> list[MPI.Request]:
        """Posts a message; its memory must stay as it is until the requests have ended (`ended`)."""
        with self._lock:
            requests = [self._comm.Isend([envelope, len(envelope), MPI.BYTE], to, ENVELOPE)]
            tag = FIRST_TAG + number % TAGS
            requests += [self._comm.Isend(spec(*block), to, tag) for block in blocks]
        return requests

    def take(self) -> tuple[int, bytearray] | None:
        """An envelope that has arrived, with its sender; None if there is none. One thread at a time."""
        with self._lock:
            try:
                message = self._comm.Improbe(MPI.ANY_SOURCE, ENVELOPE, self._status)
                if message is None:
                    return None
                envelope = bytearray(self._status.Get_count(MPI.BYTE))
                source = self._status.source
                message.Recv([envelope, len(envelope), MPI.BYTE])
            except MPI.Exception as error:
                self._bury(error)
                return None
        return source, envelope

    def receive(self, source: int, blocks: Sequence[Block], number: int) -> list[MPI.Request]:
        """Posts the receives for the blocks that an envelope has announced."""
        tag = FIRST_TAG + number % TAGS
        with self._lock:
            try:
                return [self._comm.Irecv(spec(*block), source, tag) for block in blocks]
            except MPI.Exception as error:
                self._bury(error)
                return []

    def ended(self, requests: list[MPI.Request], tests: int = 1) -> bool:
        """True once all have, or never will, since a process has died; moves them forward, at each test by a piece of memory."""
        with self._lock:
            try:
                return any(MPI.Request.Testall(requests) for _ in range(tests))
            except MPI.Exception as error:
                self._bury(error)
                return True

    def _bury(self, error: MPI.Exception) -> None:
        """Notes who has died, so that the others can go on. Raises: the error, if it is another."""
        try:
            self._comm.Ack_failed()  # messages from anybody may come again
            failed = self._comm.Get_failed()
            gone = MPI.Group.Translate_ranks(failed, None, self._comm.Get_group())
        except (MPI.Exception, NotImplementedError):  # an MPI that knows of no such thing
            gone = []
        self.dead += [rank for rank in gone if rank not in self.dead]
        if not self.dead:
            raise error
        library.dead_processes = True  # see Note [After a process has died]

    def begin_sum(self, mine: Sequence[int]) -> Sum:
        """Starts adding up these numbers over all ranks (collective); they are wrong if any process has died."""
        given, total = (struct.pack(f"<{len(mine)}q", *mine), bytearray(8 * len(mine)))
        with self._lock:
            try:
                parts = [given, len(mine), MPI.INT64_T], [total, len(mine), MPI.INT64_T]
                requests = [self._agreement.Iallreduce(*parts, MPI.SUM)]
            except MPI.Exception as error:
                self._bury(error)
                requests = []
        return Sum(requests, given, total)

    def keep(self, requests: list[MPI.Request], memory: object) -> None:
        """Keeps the memory of requests that no thread will wait for; see Note [Memory that MPI may still use]."""
        _kept[:] = [entry for entry in _kept if not self.ended(entry[0])]
        _kept.append((requests, memory))

    def meet(self) -> None:
        """Returns when every rank is here (collective); other threads go on meanwhile."""
        total, backoff = self.begin_sum([0]), Backoff.background()
        while not self.ended(total.requests):
            backoff.pause()

    def exchange(self, value: object) -> list[object]:
        """Every rank's value (collective, blocking; before any other thread uses this)."""
        return self._agreement.allgather(value)

    def free(self) -> None:
        """Gives the communicators back (collective)."""
        with self._lock:
            self._comm.Free()
            self._agreement.Free()
