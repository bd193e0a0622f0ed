"""Plain MPI calls, as users write them with mpi4py and NumPy; benchmarks compare with them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from mpicoll._mpi.library import MPI

Call = Callable[[], object]

OPERATIONS = {"SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}
BITWISE = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
INTEGERS = {f"{sign}int{bits}": getattr(MPI, f"{sign}int{bits}_t".upper()) for sign in ("", "u") for bits in (8, 16, 32, 64)}
FLOATS = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}
DATATYPES: dict[str, MPI.Datatype] = {**INTEGERS, **FLOATS}  # by NumPy name


def has(dtype: str, op: str | None) -> bool:
    """Whether MPI has a datatype for this dtype, by its NumPy name, and this reduction of it."""
    return dtype in DATATYPES and (op is None or op in OPERATIONS or (op in BITWISE and dtype in INTEGERS))


def call(name: str, *words: object, op: str | None = None) -> Call:
    """The call ``MPI.COMM_WORLD.name(*words)``, with buffers and datatypes bound in advance. The root is rank 0.

    Args:
        words: A tensor becomes its NumPy array and datatype.
        op: The reduction, which is the last word.
    """
    bound = [_buffer(word) if isinstance(word, Tensor) else word for word in words]
    return partial(getattr(MPI.COMM_WORLD, name), *bound, *([] if op is None else [{**OPERATIONS, **BITWISE}[op]]))


def _buffer(tensor: Tensor) -> list[object]:
    array = tensor.numpy()
    return [array, DATATYPES[array.dtype.name]]
