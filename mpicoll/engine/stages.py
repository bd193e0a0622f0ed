"""The reductions that have a kernel, in stages: torch's kernels within a node, MPI's operation between nodes, and the end.

Both work on the code of the table in reductions.py, so that halves stay float32 until they are rounded, once, and averages
sums until they are divided, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mpicoll.algorithms.hierarchical import Stages
from mpicoll.algorithms.shared_memory import Combine
from mpicoll.engine.kernels import Kernel
from mpicoll.engine.reductions import FLOATS, INTEGERS, OPS
from mpicoll.mpi.datatypes import datatype, operation

CODES = {name: dtype for dtype, name in {**INTEGERS, **FLOATS}.items()}
# MPI's operations by torch's kernels; logical ones meet nothing but 0 and 1.
KERNELS: dict[str, Any] = {
    "SUM": torch.add,
    "PROD": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "LAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "LOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
    "LXOR": torch.bitwise_xor,
}


@cache
def of(kernel: Kernel, size: int) -> Stages:
    """size: of the group."""
    entry = kernel.entry
    code, two = CODES[entry.mpi_type], KERNELS[entry.mpi_op]
    decode = entry.decode
    if kernel.dtype.is_floating_point and entry.mpi_op in ("MIN", "MAX"):
        partial = encoding(kernel, two)
    else:
        partial = casting(two) if code != kernel.dtype else plainly(two)
    return Stages(
        partial,
        code,
        datatype(entry.mpi_type),
        operation(entry.mpi_op),
        None if decode is None else lambda reduced, out: decode(reduced, out, size),
    )


def plainly(two: Any) -> Combine:
    def partial(parts: Sequence[Tensor], code: Tensor) -> None:
        if len(parts) == 1:
            code.copy_(parts[0])
            return
        two(parts[0], parts[1], out=code)
        for part in parts[2:]:
            two(code, part, out=code)

    return partial


def casting(two: Any) -> Combine:
    """To a wider code. Not two(parts[0], parts[1], out=code), which rounds to halves on its way."""

    def partial(parts: Sequence[Tensor], code: Tensor) -> None:
        code.copy_(parts[0])
        for part in parts[1:]:
            two(code, part, out=code)

    return partial


def encoding(kernel: Kernel, two: Any) -> Combine:
    encode, any_op = kernel.entry.encode, OPS["MIN"]  # which an encoder that is no PREMUL_SUM's does not read
    assert encode is not None

    def partial(parts: Sequence[Tensor], code: Tensor) -> None:
        code.copy_(encode(parts[0], any_op))
        for part in parts[1:]:
            two(code, encode(part, any_op), out=code)

    return partial
