"""Memory as address and number of bytes; whoever calls holds what lies there."""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

Block: TypeAlias = "tuple[int, int]"  # address, nbytes


def block(memory: Tensor) -> Block:
    """A plain contiguous tensor's."""
    return memory.data_ptr(), memory.nbytes


def pieces(count: int, longest: int) -> list[tuple[int, int]]:
    """Where pieces of so many begin and end; at least one, if an empty one."""
    return [(begin, min(begin + longest, count)) for begin in range(0, max(count, 1), longest)]


def blocks(memory: Tensor, count: int) -> list[Block]:
    """Equal parts of it, one behind the other."""
    address, nbytes = memory.data_ptr(), memory.nbytes // count
    return [(address + index * nbytes, nbytes) for index in range(count)]
