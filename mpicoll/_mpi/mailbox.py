"""Messages of any length between the processes of one communicator, received in the order in which they arrive.

A message is an envelope, which says what follows, and any number of memory blocks, which MPI copies from the memory of the sender
to that of the receiver. Envelopes are matched by Improbe and Mrecv, so that several threads may look for them. The blocks of a
message travel in order under a tag of their own.
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

ENVELOPE_TAG = 0
FIRST_TAG, TAGS = 1, 1 << 20  # blocks of message n have tag FIRST_TAG + n % TAGS; TAG_UB of all known MPIs is larger

Block = tuple[int, int]  # address, bytes
# Note [Memory that MPI may still use]
# A message to or from a rank that has left never ends, and MPI may still read or write its memory, even after this process has
# dropped the mailbox. Such memory is kept until the requests have ended, which may be never. It is bounded by what was in
# flight when the rank left: nothing is sent to it, and nothing received from it, afterwards.
_kept: list[tuple[list[MPI.Request], object]] = []


@dataclass
class Sum:
    """Numbers that MPI is adding up. Holds their memory, because mpi4py does not keep it alive."""

    requests: list[MPI.Request]
    summands: bytes
    total: bytearray

    def numbers(self) -> tuple[int, ...]:
        """Returns the sums. Only after the requests have ended."""
        return struct.unpack(f"<{len(self.total) // 8}q", self.total)


class Mailbox:
    """The mailbox of one process (making it is collective over the ranks of the runtime). Any thread may call any method.

    Attributes:
        dead: Ranks whose processes have died, in the order in which this was noticed. Always empty unless MPI survives a death:
            Open MPI under ``mpiexec --with-ft ulfm``. Other MPIs end the job.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._lock = runtime.lock
        with runtime.lock:
            self._comm = runtime.comm.Dup()
            self._sums = runtime.comm.Dup()
        self._status = MPI.Status()
        self.dead: list[int] = []

    def send(self, to: int, envelope: bytes | bytearray, blocks: Sequence[Block], number: int) -> list[MPI.Request]:
        """Posts a message. Its memory must not change until the requests have `ended`."""
        with self._lock:
            requests = [self._comm.Isend([envelope, len(envelope), MPI.BYTE], to, ENVELOPE_TAG)]
            tag = FIRST_TAG + number % TAGS
            requests += [self._comm.Isend(spec(*block), to, tag) for block in blocks]
        return requests

    def take(self) -> tuple[int, bytearray] | None:
        """Returns the sender and the envelope of a message that has arrived, or None. One thread at a time."""
        with self._lock:
            try:
                message = self._comm.Improbe(MPI.ANY_SOURCE, ENVELOPE_TAG, self._status)
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
        """Posts the receives of the blocks that an envelope has announced."""
        tag = FIRST_TAG + number % TAGS
        with self._lock:
            try:
                return [self._comm.Irecv(spec(*block), source, tag) for block in blocks]
            except MPI.Exception as error:
                self._bury(error)
                return []

    def ended(self, requests: list[MPI.Request], tests: int = 1) -> bool:
        """Returns whether all requests have ended, or never will because a process has died. A test moves a piece of memory."""
        with self._lock:
            try:
                return any(MPI.Request.Testall(requests) for _ in range(tests))
            except MPI.Exception as error:
                self._bury(error)
                return True

    def _bury(self, error: MPI.Exception) -> None:
        """Notes which processes have died, so that the others can go on. Raises any other error again."""
        try:
            self._comm.Ack_failed()  # allows receives from any source again
            failed = self._comm.Get_failed()
            died = MPI.Group.Translate_ranks(failed, None, self._comm.Get_group())
        except (MPI.Exception, NotImplementedError):  # this MPI does not survive a death
            died = []
        self.dead += [rank for rank in died if rank not in self.dead]
        if not self.dead:
            raise error
        library.dead_processes = True  # see Note [After a process has died]

    def begin_sum(self, numbers: Sequence[int]) -> Sum:
        """Starts adding up these numbers over all ranks (collective). The sums are wrong if a process has died."""
        summands, total = struct.pack(f"<{len(numbers)}q", *numbers), bytearray(8 * len(numbers))
        with self._lock:
            try:
                parts = [summands, len(numbers), MPI.INT64_T], [total, len(numbers), MPI.INT64_T]
                requests = [self._sums.Iallreduce(*parts, MPI.SUM)]
            except MPI.Exception as error:
                self._bury(error)
                requests = []
        return Sum(requests, summands, total)

    def keep(self, requests: list[MPI.Request], memory: object) -> None:
        """Keeps the memory of requests that no thread will wait for; see Note [Memory that MPI may still use]."""
        _kept[:] = [entry for entry in _kept if not self.ended(entry[0])]
        _kept.append((requests, memory))

    def meet(self) -> None:
        """Returns when every rank has called this (collective). Other threads go on meanwhile."""
        total, backoff = self.begin_sum([0]), Backoff.background()
        while not self.ended(total.requests):
            backoff.pause()

    def exchange(self, value: object) -> list[object]:
        """Returns every rank's value (collective). Blocks; call it before another thread uses the mailbox."""
        return self._sums.allgather(value)

    def free(self) -> None:
        """Frees the communicators (collective)."""
        with self._lock:
            self._comm.Free()
            self._sums.Free()
