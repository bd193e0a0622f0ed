"""Reductions by direct exchange: ranks swap slices, and torch's kernels add them up. Used where MPI could only reduce something
larger (half precision, as float32), and for memory that MPI can move but not reduce.

    [1] every rank sends slice i to rank i    [2] rank i reduces all parts of slice i    [3] every rank gathers the slices

Chunk after chunk, the next one on its way while one is reduced, so that a rank needs twice CHUNK bytes of scratch memory, however
long the tensor. An element is reduced by one rank, in the order of the ranks, so that all end with the same bits.

``settle``: called before MPI reads what was reduced; the reduction has ended when it returns.
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

CHUNK = 8 << 20  # bytes of all ranks' parts of a slice; far above a network's latency times its bandwidth


def nothing() -> None:
    """For reductions that have ended when the kernel returns."""


def all_reduce(
    channel: Channel, memory: Tensor, combine: Combine, root: int | None = None, settle: Callable[[], None] = nothing
) -> None:
    """In place on every rank, or on the root; ``memory`` is one-dimensional."""
    rank, size, total = channel.comm.Get_rank(), channel.comm.Get_size(), memory.numel()
    longest = min(_longest(memory, size), -(-total // size))
    result = memory.new_empty(longest)
    wholes = memory.split(longest * size) if total else ()
    chunks = []
    for whole in wholes:
        slices = list(whole.split(-(-whole.numel() // size)))
        chunks.append(slices + [whole[:0]] * (size - len(slices)))  # a few elements are not enough for all
    for whole, slices, parts in zip(wholes, chunks, _moved(channel, chunks, longest), strict=True):
        mine = result.narrow(0, 0, slices[rank].numel())
        if mine.numel():
            combine(parts, mine)  # [2]
        settle()
        if root is None:  # [3]
            native.all_gather_uneven(channel, whole, mine, [slice_.nbytes for slice_ in slices])
        elif rank == root:
            slices[rank].copy_(mine)
            exchange(channel, [], [(other, block(s)) for other, s in enumerate(slices) if other != rank and s.numel()])
        else:
            exchange(channel, [(root, block(mine))] if mine.numel() else [], [])


def reduce_scatter(
    channel: Channel, output: Tensor, memory: Tensor, combine: Combine, settle: Callable[[], None] = nothing
) -> None:
    """Rank i gets the reduction of everybody's i-th block of ``memory``; both one-dimensional, no memory in common."""
    size, block_ = channel.comm.Get_size(), output.numel()
    longest = min(_longest(memory, size), block_)
    starts = range(0, block_, longest or 1)
    chunks = [[memory.narrow(0, r * block_ + start, min(longest, block_ - start)) for r in range(size)] for start in starts]
    for start, parts in zip(starts, _moved(channel, chunks, longest), strict=True):
        combine(parts, output.narrow(0, start, parts[0].numel()))
        settle()  # the next chunk but one comes where these parts lie


def _longest(memory: Tensor, size: int) -> int:
    """Elements of a slice."""
    return max(1, CHUNK // size // memory.element_size())


def _moved(channel: Channel, chunks: Sequence[Sequence[Tensor]], longest: int) -> Iterator[list[Tensor]]:
    """[1], for each chunk, everybody's slices[i] to rank i: all ranks' parts of this rank's slice.

    The next chunk's messages are on their way while one is used.
    """
    rank, size = channel.comm.Get_rank(), channel.comm.Get_size()
    others = [(rank + step) % size for step in range(1, size)]  # everybody another first, so that no rank is overrun

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
