"""Operations that are one MPI call, or one call per chunk if a count is too large for MPI.

Memory is passed as plain contiguous tensors ("memory" below); the caller keeps them alive while MPI works. ``datatype`` and
``op`` are MPI handles. Chunk boundaries depend only on numbers that are equal on every rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from mpicoll._mpi.channel import IN_PLACE, Channel
from mpicoll._mpi.datatypes import INT_MAX, fromaddress, spec

CHUNK = 1 << 30  # elements; Open MPI 5.0 rejects counts above 2^31 - 1


def _chunks(memory: Tensor, datatype: Any) -> Iterator[list[object]]:
    count, size = memory.numel(), memory.element_size()
    for start in range(0, max(count, 1), CHUNK):
        n = min(CHUNK, count - start)
        yield [fromaddress(memory.data_ptr() + start * size, n * size), n, datatype]


def all_reduce(channel: Channel, memory: Tensor, datatype: Any, op: Any) -> None:
    """Reduces ``memory`` in place on every rank."""
    for chunk in _chunks(memory, datatype):
        channel.Allreduce(IN_PLACE, chunk, op)


def reduce(channel: Channel, memory: Tensor, datatype: Any, op: Any, root: int, is_root: bool) -> None:
    """Reduces ``memory`` in place on the root. The other ranks only read theirs."""
    for chunk in _chunks(memory, datatype):
        if is_root:
            channel.Reduce(IN_PLACE, chunk, op, root)
        else:
            channel.Reduce(chunk, None, op, root)


def scan(channel: Channel, memory: Tensor, datatype: Any, op: Any, exclusive: bool) -> None:
    """Reduces ``memory`` in place over ranks 0 to this one. ``exclusive``: over those before it; rank 0 keeps its values."""
    function = channel.Exscan if exclusive else channel.Scan
    for chunk in _chunks(memory, datatype):
        function(IN_PLACE, chunk, op)


def reduce_scatter(channel: Channel, output: Tensor, memory: Tensor, counts: Sequence[int], datatype: Any, op: Any) -> None:
    """Rank i gets ``counts[i]`` elements of ``datatype``: the reduction of the i-th block of ``memory`` of every rank."""
    rank = channel.comm.Get_rank()
    total = memory.numel()
    if total > INT_MAX:  # blocks one after the other: displacements are ints in MPI
        start = 0
        for root, count in enumerate(counts):
            block = memory.view(-1)[start : start + count]
            if root == rank:
                ctypes.memmove(output.data_ptr(), block.data_ptr(), block.nbytes)  # not copy_: autograd would check output
                block = output
            reduce(channel, block, datatype, op, root, root == rank)
            start += count
        return
    source, target = fromaddress(memory.data_ptr(), memory.nbytes), fromaddress(output.data_ptr(), output.nbytes)
    if min(counts) == max(counts):
        channel.Reduce_scatter_block([source, counts[rank], datatype], [target, counts[rank], datatype], op)
    else:
        channel.Reduce_scatter([source, total, datatype], [target, counts[rank], datatype], list(counts), op)


def broadcast(channel: Channel, memory: Tensor, root: int) -> None:
    channel.Bcast(spec(memory.data_ptr(), memory.nbytes), root)


def all_gather(channel: Channel, output: Tensor, memory: Tensor) -> None:
    """Gathers equal blocks: the bytes of rank i begin at ``i * memory.nbytes`` of ``output``."""
    source = spec(memory.data_ptr(), memory.nbytes)
    target = spec(output.data_ptr(), memory.nbytes)
    target[0] = fromaddress(output.data_ptr(), output.nbytes)
    channel.Allgather(source, target)


def all_gather_uneven(channel: Channel, output: Tensor, memory: Tensor, counts: Sequence[int]) -> None:
    """Gathers ``counts[i]`` bytes of each rank i, one block behind the other, in ``output`` of at most 2^31 - 1 bytes."""
    source = spec(memory.data_ptr(), memory.nbytes)
    target = [fromaddress(output.data_ptr(), output.nbytes), list(counts), source[2]]
    channel.Allgatherv(source, target)
