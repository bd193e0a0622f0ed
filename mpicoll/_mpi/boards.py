"""A board for each rank of a node, in shared memory: its rank writes a text and numbers, and all ranks of the node can read them.

Nobody waits. A reader that meets a text while it is written gets nothing, and reads again later. A number has a key, which every
rank finds for itself: no rank hands out places.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpicoll._mpi import shared_segment
from mpicoll._mpi.shared_segment import Segment

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

NBYTES = 64 << 10  # of a board
WORD = 8  # bytes; written and read as a whole
VERSION, LENGTH, CHECKSUM = range(3)  # words; the version is odd while the text is written, 0: nothing was written
TEXT = 3 * WORD  # offset of the text
_ASKED = NBYTES - 1  # offset of a byte that any rank of the node sets
NUMBERS = 256  # of a rank: a key (0: free) and the number with this key
_NUMBERS = NBYTES - WORD - 2 * WORD * NUMBERS  # offset of the numbers
BELL_WORDS = 8  # of a bell: a cache line
_BELLS = (_NUMBERS // (WORD * BELL_WORDS) - 2) * WORD * BELL_WORDS  # offset of the bells: of the program, and of what serves
MOST = _BELLS - TEXT  # bytes of a text


class Boards:
    """The boards of a node as one rank sees them.

    Args:
        ranks: Ranks of the communicator, in the order of their boards.
        own: This rank.
    """

    def __init__(self, segment: Segment, ranks: Sequence[int], own: int) -> None:
        self._memory, self._fence, self.address = segment.memory, segment.fence, segment.address
        self.words = memoryview(segment.memory)[: NBYTES * len(ranks)].cast("q")
        self.ranks = self._first = {rank: place * NBYTES for place, rank in enumerate(ranks)}
        self._own, self._mine = own, self._first[own]
        self._version = 0

    def write(self, text: bytes) -> None:
        """Replaces the text of this rank. Raises ValueError if it is longer than MOST."""
        if len(text) > MOST:
            raise ValueError(f"a text of {len(text)} bytes does not fit on a board")
        words, first, at = self.words, self._mine, self._mine // WORD
        self._version += 2
        words[at + VERSION] = self._version - 1
        self._order()
        words[at + LENGTH], words[at + CHECKSUM] = len(text), zlib.crc32(text)
        self._memory[first + TEXT : first + TEXT + len(text)] = text
        self._order()
        words[at + VERSION] = self._version

    def read(self, rank: int) -> bytes | None:
        """Returns the text of a rank; None if it has not written one, or is writing it."""
        words, first, at = self.words, self._first[rank], self._first[rank] // WORD
        version = words[at + VERSION]
        if version == 0 or version % 2:
            return None
        self._order()
        nbytes, checksum = words[at + LENGTH], words[at + CHECKSUM]
        text = self._memory[first + TEXT : first + TEXT + nbytes]
        self._order()
        return text if words[at + VERSION] == version and zlib.crc32(text) == checksum else None

    def take(self, key: int) -> int | None:
        """Gives this rank a number, 0 at first. Returns its index in ``words``; None: no place is free."""
        if (index := self.find(self._own, 0)) is not None:
            self.words[index] = 0
            self._order()
            self.words[index - 1] = key
        return index

    def give(self, index: int) -> None:
        """Frees the place of a number of this rank."""
        self.words[index - 1] = 0

    def find(self, rank: int, key: int) -> int | None:
        """Returns the index in ``words`` of a rank's number; None: it has none with this key."""
        words, begin = self.words, (self._first[rank] + _NUMBERS) // WORD
        index = next((at + 1 for at in range(begin, begin + 2 * NUMBERS, 2) if words[at] == key), None)
        self._order()  # `take` has written the number before the key
        return index

    def bell(self, rank: int, which: int) -> int:
        """Returns the index in ``words`` of the first word of a rank's bell, 0 or 1."""
        return (self._first[rank] + _BELLS) // WORD + which * BELL_WORDS

    def ask(self, rank: int) -> None:
        """Asks a rank to show where its program is."""
        self._memory[self._first[rank] + _ASKED] = 1

    def asked(self) -> bool:
        """True once after another rank has asked this one."""
        place = self._mine + _ASKED
        asked, self._memory[place] = bool(self._memory[place]), 0
        return asked

    def _order(self) -> None:
        if self._fence is not None:
            self._fence()


def make(comm: Intracomm, nodes: Sequence[int]) -> Boards | None:
    """Returns the boards of this rank's node; None on all ranks if one of them could not get shared memory (collective).

    ``nodes``: the node of each rank of ``comm``, as in `Topology`.
    """
    own = comm.Get_rank()
    ranks = [rank for rank, node in enumerate(nodes) if node == nodes[own]]
    segment = shared_segment.create(comm, NBYTES * len(ranks), maker=ranks[0])
    return None if segment is None else Boards(segment, ranks, own)
