"""Reductions in stages: torch kernels within a node, MPI's operation between nodes, and the decoding of the result.

Both reduce the code of the table in reductions.py. So halves stay float32 until they are rounded, once, and averages stay sums
until they are divided, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mpicoll._algorithms.hierarchical import Stages
from mpicoll._mpi.datatypes import predefined
from mpicoll._tensors.combine import Combine, Kernel, one_by_one
from mpicoll._tensors.reductions import FLOATS, INTEGERS, OPS, Encode

CODES = {name: dtype for dtype, name in {**INTEGERS, **FLOATS}.items()}
# The torch kernels of MPI's operations. The operands of logical operations are 0 or 1.
KERNELS: dict[str, Any] = {"SUM": torch.add, "PROD": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum}
for _name, _kernel in {"AND": torch.bitwise_and, "OR": torch.bitwise_or, "XOR": torch.bitwise_xor}.items():
    KERNELS |= {f"B{_name}": _kernel, f"L{_name}": _kernel}


@cache
def of(kernel: Kernel, size: int) -> Stages:
    """Returns the stages of a reduction over a group of ``size`` ranks."""
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
        predefined(entry.mpi_type),
        predefined(entry.mpi_op),
        None if decode is None else lambda reduced, out: decode(reduced, out, size),
    )


def in_code(two: Any, encode: Encode | None = None) -> Combine:
    """Returns a function that reduces parts into a code: a wider dtype, or the result of ``encode``.

    Not two(parts[0], parts[1], out=code): it rounds to halves before it writes the code.
    """
    any_op = OPS["MIN"]  # only the encoders of PREMUL_SUM read it

    def partial(parts: Sequence[Tensor], code: Tensor) -> None:
        encoded = parts if encode is None else (encode(part, any_op) for part in parts)
        for index, part in enumerate(encoded):
            if index == 0:
                code.copy_(part)
            else:
                two(code, part, out=code)

    return partial
