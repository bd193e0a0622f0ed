"""The shared window of a node: memory that ranks lay down for each other, and the words that announce it.

There is one segment per group, made on first use. Turns alternate between slots, and between results, so that a rank lays down
the next chunk while another rank still reads the last one:

    words      laid[r], taken[r]: the number of turns that rank r has laid down, and has taken; one cache line for each. Behind
               laid[r]: for t % 2 == 0, 1 a number of the collective that the turn belongs to, equal for equal calls; and
               for t % 4 == 0, 1, 2, 3 the number of turns after the last barrier. Behind both: whether the rank has raised
               DifferentCalls, so that it comes to no further turn
    half 0, 1  slot[0] slot[1] ... slot[n-1]                                 of turns t with t % 2 == 0, 1
    results    result[0] result[1] result[2]                                 of turns t with t % 3 == 0, 1, 2

Linux takes each page from the NUMA node of the rank that touches it first. A slot is first touched by its rank, and a part of a
result by the rank that reduces it: nobody clears the memory.

A turn t, in the order in which a rank writes:

    [1] writes its slot, once all ranks have taken turn t - 2                                laid[r] = t + 1
    [2] reads others' slots, once they have laid down turn t; may write the result           taken[r] = t + 1
    [3] reads the result, once all ranks have taken turn t; before [1] of turn t + 3

# Note [Why [3] needs no word]
# The result of turn t + 3 overwrites the result of turn t. A rank writes it in [2], after all ranks have laid turn t + 3 down,
# and so have read the result of turn t.
#
# Note [How far a rank can be ahead]
# Data of turn t + 2 is laid down once all ranks have taken turn t. A barrier waits for nobody before it announces itself. So a
# rank that has not taken turn t can find data of turn t + 1 and the barrier of turn t + 2 announced. A rank that waits in the
# barrier of turn t has taken that turn already. It can find data of turn t + 2 and the barrier of turn t + 3: hence four words.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor

from mpicoll._mpi import bell
from mpicoll._mpi.shared_segment import Segment
from mpicoll._tensors.calls import DifferentCalls

LINE = 64  # bytes; one cache line per writer, to avoid false sharing

LEFT = 7  # the word of a line that is 1 once the rank has raised DifferentCalls

MOST_VIEWS = 1024  # kept views: making a view takes a microsecond, and each chunk needs the same ones

memmove = ctypes.memmove


Fill: TypeAlias = "Callable[[int, int, int], Callable[[], None] | None]"  # see Window.turns


class Window:
    """The window as one rank sees it.

    Args:
        segment: The shared memory.
        rank: This rank's number in the window.
        size: Number of ranks.
        chunk: Bytes of a slot, and of a result.
        pause: Makes the function that is called between two checks of a word of the rank of this number. That function backs off.
        spins: Number of checks before `pause` is called, some 50 ns each.
        threads: Of each rank.

    Attributes:
        piece: Bytes of a turn of operations that need no part of a slot for every rank.
        turn: Number of the next turn, the same on all ranks.
        call: Number of the collective under way. Methods that wait for other ranks raise DifferentCalls if theirs differs.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        size: int,
        chunk: int,
        pause: Callable[[int], Callable[[], None]],
        spins: int,
        threads: int = 1,
    ) -> None:
        self.rank = rank
        self.size = size
        self.chunk = chunk
        self.piece = chunk if threads > 1 else chunk // 2  # the slots and results of two turns stay in the cache of a core
        self.turn = 0
        self.call = 0
        #: (to, from, number of bytes): addresses in the window or in the caller's memory
        self.copy: Callable[[int, int, int], object] = memmove
        self.others = [other for other in range(size) if other != rank]
        self.pause = pause
        self.spins = spins
        self._fence = segment.fence
        self._bell, self._asleep, self._wanted = bell.bell, bell.bell.words, bell.bell.wanted
        self._bytes = segment.memory
        self._words = memoryview(segment.memory)[: words_nbytes(size)].cast("q")
        step = LINE // 8
        self._my_laid, self._my_taken = rank * step, (size + rank) * step
        self._laid = [other * step for other in self.others]
        self._taken = [(size + other) * step for other in self.others]
        first = words_nbytes(size)
        self._slots = [[first + (h * size + place) * chunk for place in range(size)] for h in range(2)]
        self._results = [first + (2 * size + third) * chunk for third in range(3)]
        self._address = segment.address
        self._typed: dict[torch.dtype, Tensor] = {}
        self._views: dict[tuple[torch.dtype, int, int], Tensor] = {}

    @staticmethod
    def nbytes(size: int, chunk: int) -> int:
        """Bytes of the segment that a window needs."""
        return words_nbytes(size) + parts(size) * chunk

    def slot(self, turn: int, rank: int) -> int:
        """The address of a rank's slot."""
        return self._address + self._slots[turn & 1][rank]

    def result(self, turn: int) -> int:
        """The address of the result."""
        return self._address + self._results[turn % 3]

    def collect(self, turn: int, to: int, nbytes: int, slice_: int) -> None:
        """[3] Copies the result to an address. Rank i has written the i-th ``slice_`` bytes of the result."""
        self.copy(to, self.result(turn), nbytes)

    def view(self, dtype: torch.dtype, turn: int, place: int, offset: int, nbytes: int) -> Tensor:
        """Part of a rank's slot (``place``: the rank) or of the result (``place``: ``size``), as a tensor."""
        key = dtype, offset + (self._results[turn % 3] if place == self.size else self._slots[turn & 1][place]), nbytes
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            view = self._views[key] = self._view(*key)
        return view

    def _view(self, dtype: torch.dtype, offset: int, nbytes: int) -> Tensor:
        with torch.inference_mode(False):  # otherwise a later write outside inference mode would fail
            if dtype not in self._typed:
                self._typed[dtype] = torch.frombuffer(self._bytes, dtype=dtype)
            return self._typed[dtype].narrow(0, offset // dtype.itemsize, nbytes // dtype.itemsize)

    def write(self, turn: int, numbers: Sequence[int]) -> None:
        """[1] Writes numbers at the beginning of this rank's slot."""
        struct.pack_into(f"{len(numbers)}q", self._bytes, self._numbers_offset(turn, self.rank), *numbers)

    def read(self, turn: int, rank: int, count: int) -> tuple[int, ...]:
        """[2] Reads ``count`` numbers at the beginning of a rank's slot."""
        return struct.unpack_from(f"{count}q", self._bytes, self._numbers_offset(turn, rank))

    def _numbers_offset(self, turn: int, rank: int) -> int:
        """Offset of a rank's numbers in the segment."""
        return self._slots[turn & 1][rank]

    def extents(self, total: int, piece: int) -> list[tuple[int, int, int]]:
        """Takes as many turns as ``total`` bytes need. Returns (turn, begin, nbytes) of each piece."""
        first = self.turn
        self.turn = first + -(-total // piece)
        return [(first + n, begin, min(piece, total - begin)) for n, begin in enumerate(range(0, total, piece))]

    def turns(self, total: int, piece: int, fill: Fill) -> Iterator[tuple[int, int, int]]:
        """Takes the turns of `extents`. Lays each turn down while the one before is in progress.

        Args:
            total: Bytes of all pieces together.
            piece: Bytes of one turn.
            fill: (turn, begin, nbytes). Writes the piece into this rank's slot, or begins to and returns a function that ends it.

        Yields:
            (turn, begin, nbytes) of a piece, once every other rank's slot can be read. The caller then calls `take`.
        """
        extents = self.extents(total, piece)
        end: Callable[[], None] | None = None

        def begin(turn: int, start: int, nbytes: int) -> None:
            nonlocal end
            self.free(turn)
            end = fill(turn, start, nbytes)
            if end is None:
                self.lay(turn)

        for number, extent in enumerate(extents):
            turn = extent[0]
            if number == 0:
                begin(*extent)
            if end is not None:
                end()
                self.lay(turn)
            if number + 1 < len(extents):
                begin(*extents[number + 1])
            self.await_laid(turn)
            yield extent

    def free(self, turn: int) -> None:
        """[1] Returns once this rank may write its slot."""
        self._await(self._taken, turn - 1)

    def lay(self, turn: int) -> None:
        """[1] Announces that this rank's slot is complete. `free` must have returned, even if nothing was written."""
        self._words[self._my_laid + 1 + (turn & 1)] = self.call
        if self._fence is not None:
            self._fence()
        self._words[self._my_laid] = turn + 1
        if self._asleep[self._wanted]:
            self._bell.come()

    def await_laid(self, turn: int) -> None:
        """[2] Returns once every other rank's slot can be read.

        Raises:
            DifferentCalls: The turn of one of them belongs to another collective.
        """
        self._await_laid(self._laid, turn)

    def await_laid_by(self, rank: int, turn: int) -> None:
        """The same for the slot of one rank."""
        self._await_laid((rank * (LINE // 8),), turn)

    def _await_laid(self, indices: Sequence[int], turn: int) -> None:
        words, call, value = self._words, self.call, turn + 1
        for index in indices:
            if words[index] < value:
                self._wait(index, value)
        if self._fence is not None:
            self._fence()
        call_at, barrier_at = 1 + (turn & 1), 3 + (turn & 3)
        for index in indices:
            if words[index + call_at] != call or words[index + barrier_at] == value:
                self._leave()

    def lay_barrier(self, turn: int) -> None:
        """Announces a turn without data. Unlike `lay` it may be called before all ranks have taken turn t - 2."""
        self._words[self._my_laid + 3 + (turn & 3)] = turn + 1
        if self._fence is not None:
            self._fence()
        self._words[self._my_laid] = turn + 1
        if self._asleep[self._wanted]:
            self._bell.come()

    def check_barrier(self, turn: int) -> None:
        """[2] Raises DifferentCalls if another rank has laid down data in this turn. `missing` must have returned None."""
        if self._fence is not None:
            self._fence()
        words, place = self._words, 3 + (turn & 3)
        for index in self._laid:
            if words[index + place] != turn + 1:
                self._leave()

    def missing(self, turn: int) -> int | None:
        """The first other rank whose slot cannot be read yet. Does not wait."""
        words = self._words
        return next((index // (LINE // 8) for index in self._laid if words[index] <= turn), None)

    def take(self, turn: int) -> None:
        """[2] Announces that this rank has read all it needs of the other slots, and has written its part of the result."""
        if self._fence is not None:
            self._fence()
        self._words[self._my_taken] = turn + 1
        if self._asleep[self._wanted]:
            self._bell.come()

    def await_taken(self, turn: int) -> None:
        """[3] Returns once the whole result can be read."""
        self._await(self._taken, turn + 1)

    def _await(self, indices: Sequence[int], value: int) -> None:
        words = self._words
        for index in indices:
            if words[index] < value:
                self._wait(index, value)
        if self._fence is not None:
            self._fence()

    def _wait(self, index: int, value: int) -> None:
        words = self._words
        for _ in range(self.spins):
            if words[index] >= value:
                return
        pause = self.pause(index // (LINE // 8) % self.size)
        while words[index] < value:
            if words[index + LEFT]:
                self.left(value - 1, (index,))
            pause()

    def left(self, turn: int, indices: Sequence[int] = ()) -> None:
        """Raises DifferentCalls if another rank has raised it before it came to this turn."""
        for index in indices or self._laid:
            if self._words[index + LEFT]:
                if self._fence is not None:
                    self._fence()
                if self._words[index] <= turn:  # otherwise it has raised in a later turn
                    self._leave()

    def _leave(self) -> NoReturn:
        """Raises DifferentCalls, now on this rank, and on every rank that waits for a turn of it that never comes."""
        if self._fence is not None:
            self._fence()
        self._words[self._my_laid + LEFT] = self._words[self._my_taken + LEFT] = 1
        raise DifferentCalls


def parts(size: int) -> int:
    """Number of chunks in a window of ``size`` ranks."""
    return 2 * size + 3


def words_nbytes(size: int) -> int:
    """Bytes for the words, in whole pages."""
    return -(-2 * size * LINE // 4096) * 4096
