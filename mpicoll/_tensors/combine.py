"""Reductions by torch kernels, for algorithms that move bytes themselves: (parts in the order of the ranks, out) -> None.

A kernel reduces the bytes without an encoded copy, in one pass over the parts of all ranks. Its result is that of the table in
reductions.py. Halves are summed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._tensors.reductions import COMPLEX, FLOATS, HALVES, INTEGERS, OPS, WIDE_UNSIGNED, Reduction, unsigned_truncated
from mpicoll._tensors.reductions import TABLE as TABLE_OF_MPI

Combine: TypeAlias = "Callable[[Sequence[Tensor], Tensor], None]"


class Kernel(NamedTuple):
    """A reduction by torch."""

    dtype: torch.dtype  # as which the kernel reads the memory; its elements may be smaller than the tensor's elements
    combine: Combine
    entry: Reduction  # by which MPI reduces elements of that dtype (for bool: elements of bool)

    @property
    def widened(self) -> bool:
        """True if MPI would reduce larger elements: half precision as float32."""
        return self.dtype in HALVES and self.entry.mpi_type == "FLOAT"


def one_by_one(two: Any) -> Combine:
    """Applies ``two(a, b, out=)`` from the first part to the last."""

    def combine(parts: Sequence[Tensor], out: Tensor) -> None:
        if len(parts) == 1:
            out.copy_(parts[0])
            return
        two(parts[0], parts[1], out=out)
        for part in parts[2:]:
            two(out, part, out=out)

    return combine


added = one_by_one(torch.add)


def averaged(parts: Sequence[Tensor], out: Tensor) -> None:
    added(parts, out)
    out.div_(len(parts))


def rounded_once(two: Any) -> Combine:
    """Accumulates halves in float32 and rounds once. With two operands torch's own kernel already does so."""

    def combine(parts: Sequence[Tensor], out: Tensor) -> None:
        if len(parts) == 2:
            two(parts[0], parts[1], out=out)
            return
        wide = parts[0].to(torch.float32)
        for part in parts[1:]:
            two(wide, part, out=wide)
        out.copy_(wide)

    return combine


def quotient(entry: Reduction) -> Combine:
    """Sums integers, then divides with the decoder of the entry."""
    divide = entry.decode
    assert divide is not None

    def combine(parts: Sequence[Tensor], out: Tensor) -> None:
        added(parts, out)
        divide(out, out, len(parts))

    return combine


def averaged_once(parts: Sequence[Tensor], out: Tensor) -> None:
    wide = parts[0].to(torch.float32)
    for part in parts[1:]:
        wide.add_(part)
    out.copy_(wide.div_(len(parts)))


def in_code(dtype: torch.dtype, op: str, two: Any) -> Combine:
    """Reduces the encoded parts, with the encoder and decoder of the table's entry."""
    entry = TABLE_OF_MPI[dtype, OPS[op]]
    encode, decode = entry.encode, entry.decode
    assert encode is not None
    assert decode is not None

    def combine(parts: Sequence[Tensor], out: Tensor) -> None:
        code = encode(parts[0], OPS[op])
        for part in parts[1:]:
            two(code, encode(part, OPS[op]), out=code)
        decode(code, out, len(parts))

    return combine


def _build() -> dict[tuple[torch.dtype, ReduceOp.RedOpType], Kernel]:
    table: dict[tuple[torch.dtype, ReduceOp.RedOpType], Kernel] = {}

    def add(dtype: torch.dtype, op: str, seen: torch.dtype, combine: Combine) -> None:
        entry = TABLE_OF_MPI[dtype if dtype == torch.bool else seen, OPS[op]]
        table[dtype, OPS[op]] = Kernel(seen, combine, entry)

    bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    arithmetic = {"SUM": torch.add, "PRODUCT": torch.mul}
    order = {"MIN": torch.minimum, "MAX": torch.maximum}
    for dtype in INTEGERS:
        # Wide unsigned integers use the kernels of the signed ones, except for order and quotients.
        wide_unsigned = dtype in WIDE_UNSIGNED
        seen = getattr(torch, str(dtype).removeprefix("torch.u")) if wide_unsigned else dtype
        for name, kernel in {**arithmetic, **bits, **({} if wide_unsigned else order)}.items():
            add(dtype, name, seen, one_by_one(kernel))
        entry = TABLE_OF_MPI[seen, OPS["AVG"]]
        if wide_unsigned:
            entry = entry._replace(decode=unsigned_truncated)
        table[dtype, OPS["AVG"]] = Kernel(seen, quotient(entry), entry)
    logical = dict.fromkeys(("SUM", "MAX", "BOR"), bits["BOR"]) | dict.fromkeys(("PRODUCT", "MIN", "BAND"), bits["BAND"])
    for name, kernel in {**logical, "BXOR": bits["BXOR"]}.items():
        add(torch.bool, name, torch.uint8, one_by_one(kernel))
    for dtype in (*FLOATS, *HALVES):
        for name, kernel in arithmetic.items():
            add(dtype, name, dtype, rounded_once(kernel) if dtype in HALVES else one_by_one(kernel))
        for name, kernel in order.items():  # torch's own kernels return either of 0.0 and -0.0
            add(dtype, name, dtype, in_code(dtype, name, kernel))
        add(dtype, "AVG", dtype, averaged_once if dtype in HALVES else averaged)
    for dtype, real in COMPLEX.items():
        for name in ("SUM", "AVG"):
            add(dtype, name, real, table[real, OPS[name]].combine)
    return table


TABLE = _build()  # MPI reduces what has no kernel, by the entry in reductions.py
