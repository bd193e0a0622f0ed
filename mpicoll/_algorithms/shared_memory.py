"""Operations within one node, through its window. A chunk is small enough to stay in the caches.

Memory is passed as plain contiguous tensors, blocks as (address, nbytes). A ``combine`` reduces tensors of equal length, in the
order of the ranks, into another tensor, or into the first of them. Either one rank reduces an element for all ranks, or all ranks
reduce it in the same order, so every rank ends with the same bits.

All ranks of the window call an operation in the same order, with the same sizes. Steps [1]..[3] are those of window.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpicoll._algorithms.blocks import Block
from mpicoll._algorithms.window import LINE, Window
from mpicoll._mpi.remote_memory import Part
from mpicoll._tensors.combine import Combine


def reduce_flat(
    window: Window, output: Tensor, memory: Tensor, combine: Combine, begin: int = 0, root: int | None = None
) -> None:
    """Every rank reduces what it needs: one hand-over instead of two, and in a reduce_scatter less to do for each block.

    Between 2 ranks this is faster at any size: an all_reduce of 1 to 64 MiB takes 0.55 to 0.75 of the time of slices.

    Args:
        output: Receives the reduction of the ranks' ``memory`` from byte ``begin`` on; may be ``memory`` itself.
        memory: One-dimensional.
        root: Rank that gets the result; None: every rank.
    """
    rank, dtype, address, end = window.rank, memory.dtype, memory.data_ptr(), begin + output.nbytes
    itemsize = dtype.itemsize
    own = window.size == 2  # of more parts, `combine` reads some after it has written the output

    def fill(turn: int, start: int, nbytes: int) -> None:
        if rank != root or not own:
            window.copy(window.slot(turn, rank), address + start, nbytes)

    for turn, start, nbytes in window.turns(memory.nbytes, window.piece, fill):
        low, high = max(begin, start), min(end, start + nbytes)
        if low < high and root in (None, rank):
            parts = [window.view(dtype, turn, other, low - start, high - low) for other in range(window.size)]
            if own:
                parts[rank] = memory.narrow(0, low // itemsize, (high - low) // itemsize)
            combine(parts, output.narrow(0, (low - begin) // itemsize, (high - low) // itemsize))
        window.take(turn)


def all_reduce(window: Window, memory: Tensor, combine: Combine, root: int | None = None, slices: int | None = None) -> None:
    """Each rank reduces its slice of every chunk of one-dimensional memory.

    Args:
        root: Rank that gets the result; None: every rank.
        slices: Number of ranks, from the first one on, that have a slice; None: all.
    """
    rank, size, dtype, address = window.rank, window.size, memory.dtype, memory.data_ptr()
    itemsize = memory.element_size()
    piece = window.piece

    def slice_of(nbytes: int) -> int:
        """Bytes of a slice, in whole lines."""
        return -(-nbytes // ((slices or size) * LINE)) * LINE

    def my_slice(nbytes: int) -> tuple[int, int]:
        """Begin and end of this rank's slice of ``nbytes`` bytes."""
        slice_ = slice_of(nbytes)
        return min(nbytes, rank * slice_), min(nbytes, (rank + 1) * slice_)

    def fill(turn: int, begin: int, nbytes: int) -> None:
        low, high = my_slice(nbytes)
        slot, source = window.slot(turn, rank), address + begin
        if low:
            window.copy(slot, source, low)
        if high < nbytes:
            window.copy(slot + high, source + high, nbytes - high)

    def receive(turn: int, begin: int, nbytes: int) -> None:
        if root is None or root == rank:
            window.await_taken(turn)
            window.collect(turn, address + begin, nbytes, slice_of(nbytes))  # [3]

    # A result is received one turn later: by then the others have written their slices, and no rank waits.
    before = None
    for turn, begin, nbytes in window.turns(memory.nbytes, piece, fill):
        low, high = my_slice(nbytes)
        if high > low:  # [2]
            parts = [window.view(dtype, turn, r, low, high - low) for r in range(size)]
            parts[rank] = memory.narrow(0, (begin + low) // itemsize, (high - low) // itemsize)
            combine(parts, window.view(dtype, turn, size, low, high - low))
        window.take(turn)
        if before is not None:
            receive(*before)
        before = turn, begin, nbytes
    if before is not None:
        receive(*before)


def exchange(window: Window, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the numbers of every rank."""
    turn = window.turn
    window.turn = turn + 1
    window.free(turn)
    window.write(turn, numbers)  # [1]
    window.lay(turn)
    window.await_laid(turn)
    found = [window.read(turn, rank, len(numbers)) for rank in range(window.size)]  # [2]
    window.take(turn)
    return found


def all_reduce_in_place(window: Window, parts: Sequence[Part], nbytes: int, dtype: torch.dtype, combine: Combine) -> None:
    """Each rank reduces its slice of the memory of all ranks, which it maps, and writes the result into all of them.

    ``parts``: the memory of each rank; it has ``nbytes``. All ranks have called `exchange` just before.
    """
    turn, rank = window.turn, window.rank
    window.turn = turn + 1
    window.free(turn)
    slice_ = round_up(-(-nbytes // window.size), LINE)
    for begin in range(rank * slice_, min(nbytes, (rank + 1) * slice_), window.chunk):
        count = min(window.chunk, (rank + 1) * slice_ - begin, nbytes - begin) // dtype.itemsize
        result, *others = [torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset + begin) for buffer, offset in parts]
        combine([result, *others], result)
        for other in others:
            window.copy(other.data_ptr(), result.data_ptr(), result.nbytes)
    window.lay(turn)
    window.take(turn)
    window.await_taken(turn)


def reduce_scatter(window: Window, output: Tensor, memory: Tensor, combine: Combine) -> None:
    """Rank i gets the reduction of the i-th block of every rank's ``memory``. Both are one-dimensional and do not overlap."""
    rank, size, dtype, block, address = window.rank, window.size, memory.dtype, output.nbytes, memory.data_ptr()
    itemsize = memory.element_size()
    piece = window.chunk // size // LINE * LINE  # bytes of a block in a slot

    def fill(turn: int, begin: int, nbytes: int) -> None:
        slot = window.slot(turn, rank)
        for other in window.others:
            window.copy(slot + other * piece, address + other * block + begin, nbytes)

    for turn, begin, nbytes in window.turns(block, piece, fill):
        parts = [window.view(dtype, turn, r, rank * piece, nbytes) for r in range(size)]
        parts[rank] = memory.narrow(0, (rank * block + begin) // itemsize, nbytes // itemsize)
        combine(parts, output.narrow(0, begin // itemsize, nbytes // itemsize))
        window.take(turn)


def all_gather(window: Window, targets: Sequence[Block], source: Block) -> None:
    """The source of rank i arrives in ``targets[i]`` of every rank. Sizes may differ; a target may be its rank's source."""
    rank, (address, source_nbytes) = window.rank, source
    piece = window.piece
    own_target = targets[rank][0]

    def fill(turn: int, begin: int, longest: int) -> None:
        nbytes = min(piece, source_nbytes - begin)
        if nbytes > 0:
            window.copy(window.slot(turn, rank), address + begin, nbytes)
            if own_target != address:
                window.copy(own_target + begin, address + begin, nbytes)

    for turn, begin, _ in window.turns(max(nbytes for _, nbytes in targets), piece, fill):
        for other in window.others:
            target, total = targets[other]
            nbytes = min(piece, total - begin)
            if nbytes > 0:
                window.copy(target + begin, window.slot(turn, other), nbytes)
        window.take(turn)


def broadcast(window: Window, memory: Block, root: int) -> None:
    """The bytes of the root arrive in the memory of every rank."""
    address, total = memory
    for turn, begin, nbytes in window.extents(total, window.piece):
        if window.rank == root:
            window.free(turn)
            window.copy(window.slot(turn, root), address + begin, nbytes)
            window.lay(turn)
        else:
            window.await_laid_by(root, turn)
            window.copy(address + begin, window.slot(turn, root), nbytes)
        window.take(turn)


def all_to_all(window: Window, targets: Sequence[Block], sources: Sequence[Block]) -> list[tuple[int, int]]:
    """``sources[j]`` of rank i arrives in ``targets[i]`` of rank j. Sizes are free; no rank needs to know the sizes of others.

    Every rank first lays down the sizes of its sources and of its targets, and behind them the sources if they fit, each with as
    much room as the longest one.

    Returns:
        The pairs (i, j) in which rank i sends more or less than rank j expects, the same on all ranks. If there is any such pair,
        nothing has arrived.
    """
    rank, size = window.rank, window.size
    first = window.turn
    window.turn = first + 1
    source_sizes = [nbytes for _, nbytes in sources]
    numbers = (*source_sizes, *(nbytes for _, nbytes in targets))
    header = round_up(2 * size * 8, LINE)
    window.free(first)
    window.write(first, numbers)
    room = round_up(max(source_sizes), LINE)
    if header + size * room <= window.chunk:
        place = window.slot(first, rank) + header
        for receiver in window.others:
            window.copy(place + receiver * room, *sources[receiver])
    window.lay(first)
    window.await_laid(first)
    laid = [numbers if other == rank else window.read(first, other, 2 * size) for other in range(size)]
    sent = [sizes[:size] for sizes in laid]
    if laid.count(numbers) < size or min(numbers) < max(numbers):  # otherwise all blocks of all ranks have one size
        expected = list(zip(*(sizes[size:] for sizes in laid), strict=True))
        if sent != expected:
            window.take(first)
            return [(i, j) for i in range(size) for j in range(size) if sent[i][j] != expected[i][j]]
    large = []  # ranks whose sources do not fit
    for sender in range(size):
        room = round_up(max(sent[sender]), LINE)
        if header + size * room > window.chunk:
            large.append(sender)
        elif sender != rank:
            target, nbytes = targets[sender]
            window.copy(target, window.slot(first, sender) + header + rank * room, nbytes)
    window.take(first)
    window.copy(targets[rank][0], sources[rank][0], source_sizes[rank])
    if large:
        longest = max(sent[sender][receiver] for sender in large for receiver in range(size) if receiver != sender)
        _in_pieces(window, targets, sources, large, longest)
    return []


def _in_pieces(window: Window, targets: Sequence[Block], sources: Sequence[Block], senders: Sequence[int], longest: int) -> None:
    """Moves the sources of ``senders`` to the other ranks, in as many turns as the longest source takes."""
    rank = window.rank
    piece = window.chunk // window.size // LINE * LINE

    def fill(turn: int, begin: int, longest: int) -> None:
        if rank in senders:
            slot = window.slot(turn, rank)
            for receiver in window.others:
                address, nbytes = sources[receiver]
                if nbytes > begin:
                    window.copy(slot + receiver * piece, address + begin, min(piece, nbytes - begin))

    for turn, begin, _ in window.turns(longest, piece, fill):
        for sender in senders:
            address, nbytes = targets[sender]
            if sender != rank and nbytes > begin:
                window.copy(address + begin, window.slot(turn, sender) + rank * piece, min(piece, nbytes - begin))
        window.take(turn)


def barrier(window: Window, timeout_s: float, failed: Callable[[], bool] = bool) -> bool:
    """Returns True once all ranks have called this, or False after ``timeout_s`` seconds, or if ``failed()``."""
    turn = window.turn
    window.turn = turn + 1
    window.lay_barrier(turn)
    window.take(turn)
    for _ in range(window.spins + 1):
        if window.missing(turn) is None:
            window.check_barrier(turn)
            return True
    deadline = time.monotonic() + timeout_s
    while (missing := window.missing(turn)) is not None:
        pause = window.pause(missing)
        while window.missing(turn) == missing:
            if time.monotonic() > deadline or failed():
                return False
            window.left(turn)
            pause()
    window.check_barrier(turn)
    return True


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
