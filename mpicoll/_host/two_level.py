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

from mpicoll._algorithms.hierarchical import Stages
from mpicoll._algorithms.shared_memory import Combine
from mpicoll._mpi.datatypes import datatype, operation
from mpicoll._tensors.combine import Kernel, one_by_one
from mpicoll._tensors.reductions import FLOATS, INTEGERS, OPS, Encode

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
        partial = in_code(two, entry.encode)
    else:
        partial = in_code(two) if code != kernel.dtype else one_by_one(two)
    return Stages(
        partial,
        code,
        datatype(entry.mpi_type),
        operation(entry.mpi_op),
        None if decode is None else lambda reduced, out: decode(reduced, out, size),
    )


def in_code(two: Any, encode: Encode | None = None) -> Combine:
    """To a wider code, or one that ``encode`` makes. Not two(parts[0], parts[1], out=code), which rounds to halves on its way."""
    any_op = OPS["MIN"]  # which an encoder that is no PREMUL_SUM's does not read

    def partial(parts: Sequence[Tensor], code: Tensor) -> None:
        encoded = parts if encode is None else (encode(part, any_op) for part in parts)
        for index, part in enumerate(encoded):
            if index == 0:
                code.copy_(part)
            else:
                two(code, part, out=code)

    return partial
