"""The MPI calls alone, as one would write them with mpi4py and NumPy: what benchmarks compare with.

Each function returns a call over MPI.COMM_WORLD (collective), whose buffers and datatypes are bound beforehand. Root: rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpicoll._mpi.library import MPI

Call = Callable[[], object]
Array = np.ndarray[Any, np.dtype[Any]]

OPERATIONS = {"SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}
BITWISE = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
INTEGERS = {f"{sign}int{bits}": getattr(MPI, f"{sign}int{bits}_t".upper()) for sign in ("", "u") for bits in (8, 16, 32, 64)}
FLOATS = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}
DATATYPES: dict[str, MPI.Datatype] = {**INTEGERS, **FLOATS}  # by NumPy's name
_WORLD = MPI.COMM_WORLD


def moves(dtype: str) -> bool:
    """Whether there is a call for this dtype, by NumPy's name."""
    return dtype in DATATYPES


def reduces(dtype: str, op: str) -> bool:
    """Whether MPI has this reduction of it."""
    return moves(dtype) and (op in OPERATIONS or (op in BITWISE and dtype in INTEGERS))


def _operation(op: str) -> MPI.Op:
    return {**OPERATIONS, **BITWISE}[op]


def _spec(array: Array) -> list[Any]:
    return [array, DATATYPES[array.dtype.name]]


def all_reduce(array: Array, op: str = "SUM") -> Call:
    """In place."""
    message, operation = _spec(array), _operation(op)
    return lambda: _WORLD.Allreduce(MPI.IN_PLACE, message, operation)


def reduce(array: Array, op: str = "SUM") -> Call:
    """In place on rank 0."""
    message, operation = _spec(array), _operation(op)
    if _WORLD.rank == 0:
        return lambda: _WORLD.Reduce(MPI.IN_PLACE, message, operation, 0)
    return lambda: _WORLD.Reduce(message, None, operation, 0)


def broadcast(array: Array) -> Call:
    message = _spec(array)
    return lambda: _WORLD.Bcast(message, 0)


def all_gather(output: Array, array: Array) -> Call:
    message, found = _spec(array), _spec(output)
    return lambda: _WORLD.Allgather(message, found)


def gather(output: Array | None, array: Array) -> Call:
    """output: on rank 0; elsewhere None."""
    message, found = _spec(array), None if output is None else _spec(output)
    return lambda: _WORLD.Gather(message, found, 0)


def scatter(array: Array, source: Array | None) -> Call:
    """source: on rank 0; elsewhere None."""
    found, message = _spec(array), None if source is None else _spec(source)
    return lambda: _WORLD.Scatter(message, found, 0)


def reduce_scatter(output: Array, array: Array, op: str = "SUM") -> Call:
    message, found, operation = _spec(array), _spec(output), _operation(op)
    return lambda: _WORLD.Reduce_scatter_block(message, found, operation)


def all_to_all(output: Array, array: Array) -> Call:
    message, found = _spec(array), _spec(output)
    return lambda: _WORLD.Alltoall(message, found)


def barrier() -> Call:
    return _WORLD.Barrier


def ping_pong(output: Array, array: Array) -> Call | None:
    """There and back between ranks 0 and 1; None on other ranks."""
    message, found, peer = _spec(array), _spec(output), 1 - _WORLD.rank

    def first() -> None:
        _WORLD.Send(message, peer)
        _WORLD.Recv(found, peer)

    def second() -> None:
        _WORLD.Recv(found, peer)
        _WORLD.Send(message, peer)

    return {0: first, 1: second}.get(_WORLD.rank)


def stream(output: Array, array: Array, window: int) -> Call | None:
    """``window`` messages from rank 0 to 1, all under way at once, and a small one back; None on other ranks."""
    message, found, done = _spec(array), _spec(output), _spec(np.zeros(1, dtype=np.float32))

    def first() -> None:
        MPI.Request.Waitall([_WORLD.Isend(message, 1) for _ in range(window)])
        _WORLD.Recv(done, 1)

    def second() -> None:
        MPI.Request.Waitall([_WORLD.Irecv(found, 0) for _ in range(window)])
        _WORLD.Send(done, 0)

    return {0: first, 1: second}.get(_WORLD.rank)
