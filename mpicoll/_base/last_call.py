"""What a rank was doing last, in memory that outlives it: a rank that is killed cannot tell it any more.

The program writes it, about once a second. Its monitor reads it after the program has ended. The memory is one anonymous page,
made before the monitor forks the program: it has no name and no file descriptor, and a program that the rank starts
does not have it.

    place 0, place 1     checksum | number of the write | time | bytes | text

Writes go to the two places in turn. So a program that is killed while it writes leaves the text before.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from typing import NamedTuple

NBYTES = 4096
_PLACE = NBYTES // 2  # bytes
_CHECKSUM = struct.Struct("=I")  # of all that follows
_HEADER = struct.Struct("=QdI")  # number of the write; when, by the clock that the processes of a host share; bytes of the text
MOST = _PLACE - _CHECKSUM.size - _HEADER.size  # bytes of a text


class Written(NamedTuple):
    """A text, and when it was written (time.monotonic)."""

    at_s: float
    text: str


class Memory:
    """Memory that a process shares with the processes that it forks."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NBYTES)
        self._number = 0  # of writes

    def write(self, text: str) -> None:
        """Replaces the text. Cuts a longer one than MOST."""
        self._number += 1
        data = text.encode(errors="replace")[:MOST]
        body = _HEADER.pack(self._number, time.monotonic(), len(data)) + data
        first = self._number % 2 * _PLACE
        self._memory[first : first + _CHECKSUM.size + len(body)] = _CHECKSUM.pack(zlib.crc32(body)) + body

    def read(self) -> Written | None:
        """Returns the last complete text; None if there is none."""
        written = dict(filter(None, (self._read(place * _PLACE) for place in (0, 1))))
        return written[max(written)] if written else None

    def _read(self, first: int) -> tuple[int, Written] | None:
        (checksum,) = _CHECKSUM.unpack_from(self._memory, first)
        body = self._memory[first + _CHECKSUM.size : first + _PLACE]
        number, at_s, nbytes = _HEADER.unpack_from(body)
        if zlib.crc32(body[: _HEADER.size + nbytes]) != checksum:
            return None
        return number, Written(at_s, body[_HEADER.size : _HEADER.size + nbytes].decode(errors="replace"))


_memory: Memory | None = None
_owner = 0  # a forked child has the memory, too, and is not the rank


def use(memory: Memory) -> None:
    """Makes `write` of this process write to ``memory``."""
    global _memory, _owner
    _memory, _owner = memory, os.getpid()


def wanted() -> bool:
    """Whether a monitor will read it."""
    return _memory is not None and os.getpid() == _owner


def write(text: str) -> None:
    """Replaces what the monitor will read. Does nothing if there is no monitor."""
    if _memory is not None and wanted():
        _memory.write(text)
