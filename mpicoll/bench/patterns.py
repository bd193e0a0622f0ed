"""Test values that depend on rank and position, and their reductions.

A tensor is filled with a block that repeats. The period is not a power of two, so that a misplaced part of a message is noticed.
Values are 1 to 7 (1 and 2 for products; 0 and 1 for bool), so that float16, bfloat16 and int8 hold every result exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

PERIOD = 7 * 1009  # elements
AT_ONCE = 256  # periods compared at a time, to need little memory beside a tensor of 256 MiB

FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


def block(rank: int, start: int, dtype: torch.dtype, op: str = "SUM") -> Tensor:
    """One period of the vector of ``rank``, from element ``start`` on."""
    return _wide(rank, start, dtype, op).to(dtype)


def reduced(size: int, start: int, dtype: torch.dtype, op: str) -> Tensor:
    """One period of the reduction over ranks 0 to size - 1."""
    folded = reduce(FOLDS[op], [_wide(rank, start, dtype, op) for rank in range(size)])
    return (folded / size if op == "AVG" else folded).to(dtype)


def _wide(rank: int, start: int, dtype: torch.dtype, op: str) -> Tensor:
    i = torch.arange(start, start + PERIOD)
    values = (i + i // 1009 + 3 * rank) % (2 if op == "PRODUCT" else 7) + 1
    return values % 2 if dtype == torch.bool else values


def fill(tensor: Tensor, values: Tensor) -> None:
    """Repeats ``values`` over a contiguous tensor."""
    memory, period = _bytes(tensor), _bytes(values)
    periods = memory.numel() // period.numel()
    whole = periods * period.numel()
    memory[:whole].view(-1, period.numel()).copy_(period.expand(periods, -1))
    memory[whole:].copy_(period[: memory.numel() - whole])


def holds(tensor: Tensor, values: Tensor, exact: bool = True) -> bool:
    """Whether a contiguous tensor holds the values of ``fill``; if not exact, up to rounding."""
    memory, expected = (_bytes(tensor), _bytes(values)) if exact else (tensor.view(-1), values)
    if tensor.dtype == torch.bool:
        memory = memory != 0  # Gloo leaves a True of 2
    rows, rest = divmod(memory.numel(), expected.numel())
    whole = memory[: rows * expected.numel()].view(-1, expected.numel())
    pieces = [(piece, expected) for piece in whole.split(AT_ONCE) if piece.numel()]
    pieces += [(memory[-rest:], expected[:rest])] if rest else []
    return all(_same(piece, part.expand_as(piece), exact) for piece, part in pieces)


def _same(actual: Tensor, expected: Tensor, exact: bool) -> bool:
    return bool((actual == expected).all()) if exact else torch.allclose(actual, expected, rtol=1e-2)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
