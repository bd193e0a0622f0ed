"""A communicator beside those of the program, on which the ranks of a test session exchange reports.

It is made by mpi4py alone, so that an error in the rest of mpicoll cannot break the reports, and a test program needs no torch.
Nobody blocks in it: requests are tested between sleeps, so that Python threads go on, and a rank that waits leaves its core.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI

from mpicoll._base.facts import ranks_in_words

ROW = 1024  # bytes of each rank in the first message: a test that has passed needs no second one
_LENGTH = struct.Struct("=Q")
SPIN_S, SHORT_NAP_S, LONG_NAP_S = 0.002, 0.0005, 0.01  # a wait yields the core, then sleeps, and sleeps longer after 1 s

END = "end of session"

Late = Sequence[tuple[float, Callable[[], None]]]  # what a rank does that has waited so many seconds, in order


class Record(NamedTuple):
    """What one rank brings to an exchange: where it is, and a value that pickles."""

    place: str
    payload: Any


class Left(Exception):
    """Ranks have ended their session, and this rank has not."""


class SideChannel:
    """The channel of this rank."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.one_node: bool = node.size == self.size  # the ranks share memory, and MPI knows it
        node.Free()
        vendor, version = MPI.get_vendor()
        self.library = f"{vendor} {'.'.join(map(str, version))}"
        self.waits_at = ""  # the place of the exchange in which this rank waits; read by the watch's thread
        self._memory: list[object] = []  # of the exchange under way: MPI may write to it after an exception has ended the wait

    def exchange(self, place: str, payload: Any, late: Late = ()) -> list[Record]:
        """Every rank's record, by rank (collective: each rank in some exchange, not necessarily at the same place)."""
        if self.size == 1:
            return [Record(place, payload)]
        if self.waits_at:  # an exception has ended that exchange: in the next one other messages would meet
            raise TimeoutError(f"rank {self.rank} of {self.size} was interrupted at: {self.waits_at}")
        self.waits_at = place
        data = pickle.dumps((place, payload))
        row = bytearray((_LENGTH.pack(len(data)) + data)[:ROW].ljust(ROW, b"\0"))
        rows = bytearray(ROW * self.size)
        self._memory = [row, rows]
        self._wait(self.comm.Iallgather([row, MPI.BYTE], [rows, MPI.BYTE]), late)
        texts = [bytes(rows[ROW * r : ROW * (r + 1)]) for r in range(self.size)]
        lengths = [_LENGTH.unpack_from(text)[0] for text in texts]
        room = ROW - _LENGTH.size
        rest = [max(0, length - room) for length in lengths]
        parts = self._rest(data[room:], rest) if any(rest) else [b""] * self.size
        self.waits_at = ""
        return [
            Record(*pickle.loads(text[_LENGTH.size :][:length] + part))
            for text, length, part in zip(texts, lengths, parts, strict=True)
        ]

    def _rest(self, data: bytes, counts: list[int]) -> list[bytes]:
        """What did not fit into the first message."""
        own, blocks = bytearray(data), bytearray(sum(counts))
        self._memory = [own, blocks]
        self._wait(self.comm.Iallgatherv([own, MPI.BYTE], [blocks, counts, MPI.BYTE]))
        ends = [sum(counts[: r + 1]) for r in range(self.size)]
        return [bytes(blocks[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    def exchange_at(self, place: str, payload: Any, late: Late = ()) -> list[Any]:
        """Payloads of all ranks once all are at ``place``; answers those that are elsewhere in the same test, as in `agree`.

        Raises:
            Left: Ranks have ended their session.
        """
        while True:
            records = self.exchange(place, payload, late)
            gone = [r for r, record in enumerate(records) if record.place == END]
            if gone and place != END:
                raise Left(f"{ranks_in_words(gone)} left the session during {place}")
            if all(record.place == place for record in records):
                return [record.payload for record in records]

    def _wait(self, request: MPI.Request, late: Late = ()) -> None:
        began, steps = time.monotonic(), list(late)
        while not request.Test():
            if (waited := time.monotonic() - began) < SPIN_S:
                os.sched_yield()  # time.sleep(0) takes 0.05 ms
            else:
                time.sleep(SHORT_NAP_S if waited < 1 else LONG_NAP_S)
            if steps and waited > steps[0][0]:
                steps.pop(0)[1]()

    def abort(self) -> None:
        MPI.COMM_WORLD.Abort(1)


def communicator() -> MPI.Intracomm:
    """A duplicate of MPI.COMM_WORLD (collective)."""
    return MPI.COMM_WORLD.Dup()


def unreceived(comm: MPI.Intracomm) -> str:
    """Names a message that has come to this rank on ``comm`` and that nobody has received; empty: there is none."""
    status = MPI.Status()
    if not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        return ""
    return f"rank {comm.rank}: a message of rank {status.source} with tag {status.tag} was not received"
