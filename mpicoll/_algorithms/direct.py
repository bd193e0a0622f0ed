"""Reductions by direct exchange: ranks swap slices, and torch kernels reduce them. Used for half precision, which MPI could
reduce only as float32, and for memory that MPI can move but not reduce.

    [1] every rank sends slice i to rank i    [2] rank i reduces all parts of slice i    [3] every rank gathers the slices

The tensor is reduced chunk after chunk. The next chunk moves while one is reduced, so a rank needs scratch memory of twice CHUNK
bytes for a tensor of any length. One rank reduces an element, in the order of the ranks, so all ranks end with the same bits.

``settle`` is called before MPI reads a result. When it returns, the reduction has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from mpicoll._algorithms import native
from mpicoll._algorithms.blocks import block
from mpicoll._algorithms.pairwise import begin, exchange
from mpicoll._algorithms.shared_memory import Combine
from mpicoll._mpi.channel import Channel

CHUNK = 8 << 20  # bytes of a slice, the parts of all ranks together; far above the latency of a network times its bandwidth


def nothing() -> None:
    """The ``settle`` of reductions that have ended when the kernel returns."""


def all_reduce(
    channel: Channel, memory: Tensor, combine: Combine, root: int | None = None, settle: Callable[[], None] = nothing
) -> None:
    """Reduces one-dimensional ``memory`` in place, on every rank or on the root only. ``settle``: see above."""
    rank, size, total = channel.comm.Get_rank(), channel.comm.Get_size(), memory.numel()
    longest = min(_longest(memory, size), -(-total // size))
    result = memory.new_empty(longest)
    wholes = memory.split(longest * size) if total else ()
    chunks = []
    for whole in wholes:
        slices = list(whole.split(-(-whole.numel() // size)))
        chunks.append(slices + [whole[:0]] * (size - len(slices)))  # few elements: the last ranks have empty slices
    for whole, slices, parts in zip(wholes, chunks, _moved(channel, chunks, longest), strict=True):
        reduced = result.narrow(0, 0, slices[rank].numel())
        if reduced.numel():
            combine(parts, reduced)  # [2]
        settle()
        if root is None:  # [3]
            native.all_gather_uneven(channel, whole, reduced, [slice_.nbytes for slice_ in slices])
        elif rank == root:
            slices[rank].copy_(reduced)
            exchange(channel, [], [(other, block(s)) for other, s in enumerate(slices) if other != rank and s.numel()])
        else:
            exchange(channel, [(root, block(reduced))] if reduced.numel() else [], [])


def reduce_scatter(
    channel: Channel, output: Tensor, memory: Tensor, combine: Combine, settle: Callable[[], None] = nothing
) -> None:
    """Rank i gets the reduction of the i-th block of every rank's ``memory``. Both are one-dimensional and do not overlap."""
    size, block_ = channel.comm.Get_size(), output.numel()
    longest = min(_longest(memory, size), block_)
    starts = range(0, block_, longest or 1)
    chunks = [[memory.narrow(0, r * block_ + start, min(longest, block_ - start)) for r in range(size)] for start in starts]
    for start, parts in zip(starts, _moved(channel, chunks, longest), strict=True):
        combine(parts, output.narrow(0, start, parts[0].numel()))
        settle()  # the chunk after the next one overwrites these parts


def _longest(memory: Tensor, size: int) -> int:
    """Number of elements of the longest slice."""
    return max(1, CHUNK // size // memory.element_size())


def _moved(channel: Channel, chunks: Sequence[Sequence[Tensor]], longest: int) -> Iterator[list[Tensor]]:
    """[1] For each chunk, sends slices[i] to rank i. Yields the parts that all ranks have of this rank's slice.

    The messages of the next chunk move while the caller uses one.
    """
    rank, size = channel.comm.Get_rank(), channel.comm.Get_size()
    others = [(rank + step) % size for step in range(1, size)]  # each rank begins with another one, so that no rank is overrun

    def started(number: int) -> tuple[list[Tensor], list[Any]]:
        slices, rows = chunks[number], scratch[number % 2]
        n = slices[rank].numel()
        parts = [slices[rank] if r == rank else rows[r].narrow(0, 0, n) for r in range(size)]
        sends = [(other, block(slices[other])) for other in others if slices[other].numel()]
        return parts, begin(channel, sends, [(other, block(parts[other])) for other in reversed(others) if n])

    if not chunks:
        return
    scratch = [chunks[0][0].new_empty(size, longest) for _ in range(min(2, len(chunks)))]
    following = started(0)
    for number in range(len(chunks)):
        parts, requests = following
        channel.wait_all(requests)
        if number + 1 < len(chunks):
            following = started(number + 1)
        yield parts
