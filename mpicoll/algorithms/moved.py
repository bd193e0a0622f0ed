"""Reductions made of moved bytes, for what MPI can only reduce as something larger: halves, which it would take as float32.

    [1] everybody sends slice i to rank i    [2] rank i reduces all parts of slice i    [3] everybody gathers the slices

Chunk after chunk, so that a rank needs CHUNK bytes of scratch memory, however long the tensor. An element is reduced by one
rank, in the order of the ranks, so that all end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mpicoll.algorithms import native
from mpicoll.algorithms.blocks import block
from mpicoll.algorithms.exchange import exchange
from mpicoll.algorithms.shared_memory import Combine
from mpicoll.mpi.channel import Channel

CHUNK = 8 << 20  # bytes of all ranks' parts of a slice; far above a network's latency times its bandwidth


def all_reduce(channel: Channel, memory: Tensor, combine: Combine) -> None:
    """In place on every rank; ``memory`` is one-dimensional."""
    rank, size, total = channel.comm.Get_rank(), channel.comm.Get_size(), memory.numel()
    longest = min(_longest(memory, size), -(-total // size))
    parts, result = memory.new_empty(size, longest), memory.new_empty(longest)
    for start in range(0, total, longest * size):
        chunk = memory.narrow(0, start, min(longest * size, total - start))
        slices = list(chunk.split(-(-chunk.numel() // size)))
        slices += [chunk[:0]] * (size - len(slices))  # a few elements are not enough for all
        mine = result.narrow(0, 0, slices[rank].numel())
        _reduce(channel, slices, parts, mine, combine)
        native.all_gather_uneven(channel, chunk, mine, [slice_.nbytes for slice_ in slices])  # [3]


def reduce_scatter(channel: Channel, output: Tensor, memory: Tensor, combine: Combine) -> None:
    """Rank i gets the reduction of everybody's i-th block of ``memory``; both one-dimensional, no memory in common."""
    size, block = channel.comm.Get_size(), output.numel()
    longest = min(_longest(memory, size), block)
    parts = memory.new_empty(size, longest)
    for start in range(0, block, longest):
        n = min(longest, block - start)
        slices = [memory.narrow(0, rank * block + start, n) for rank in range(size)]
        _reduce(channel, slices, parts, output.narrow(0, start, n), combine)


def _longest(memory: Tensor, size: int) -> int:
    """Elements of a slice."""
    return max(1, CHUNK // size // memory.element_size())


def _reduce(channel: Channel, slices: Sequence[Tensor], scratch: Tensor, out: Tensor, combine: Combine) -> None:
    """[1] and [2]: everybody's slices[i] to rank i's ``out``; scratch: a row for each rank."""
    rank, size, n = channel.comm.Get_rank(), channel.comm.Get_size(), out.numel()
    others = [(rank + step) % size for step in range(1, size)]  # everybody another first, so that no rank is overrun
    parts = [slices[rank] if r == rank else scratch[r].narrow(0, 0, n) for r in range(size)]
    sends = [(other, block(slices[other])) for other in others if slices[other].numel()]
    exchange(channel, sends, [(other, block(parts[other])) for other in reversed(others) if n])
    if n:
        combine(parts, out)
