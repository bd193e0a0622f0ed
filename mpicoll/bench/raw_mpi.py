"""Plain MPI calls, as users write them with mpi4py and NumPy; benchmarks compare with them.

Each function returns a call on MPI.COMM_WORLD (collective) with buffers and datatypes bound in advance. The root is rank 0.
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
DATATYPES: dict[str, MPI.Datatype] = {**INTEGERS, **FLOATS}  # by NumPy name
_WORLD = MPI.COMM_WORLD


def moves(dtype: str) -> bool:
    """Whether there is a datatype for this dtype, by its NumPy name."""
    return dtype in DATATYPES


def reduces(dtype: str, op: str) -> bool:
    """Whether MPI has this reduction of this dtype."""
    return moves(dtype) and (op in OPERATIONS or (op in BITWISE and dtype in INTEGERS))


def _operation(op: str) -> MPI.Op:
    return {**OPERATIONS, **BITWISE}[op]


def _spec(array: Array) -> list[Any]:
    return [array, DATATYPES[array.dtype.name]]


def all_reduce(array: Array, op: str = "SUM") -> Call:
    """In place."""
    sent, operation = _spec(array), _operation(op)
    return lambda: _WORLD.Allreduce(MPI.IN_PLACE, sent, operation)


def reduce(array: Array, op: str = "SUM") -> Call:
    """In place on rank 0."""
    sent, operation = _spec(array), _operation(op)
    if _WORLD.rank == 0:
        return lambda: _WORLD.Reduce(MPI.IN_PLACE, sent, operation, 0)
    return lambda: _WORLD.Reduce(sent, None, operation, 0)


def broadcast(array: Array) -> Call:
    sent = _spec(array)
    return lambda: _WORLD.Bcast(sent, 0)


def all_gather(output: Array, array: Array) -> Call:
    sent, received = _spec(array), _spec(output)
    return lambda: _WORLD.Allgather(sent, received)


def gather(output: Array | None, array: Array) -> Call:
    """output: on rank 0; elsewhere None."""
    sent, received = _spec(array), None if output is None else _spec(output)
    return lambda: _WORLD.Gather(sent, received, 0)


def scatter(array: Array, source: Array | None) -> Call:
    """source: on rank 0; elsewhere None."""
    received, sent = _spec(array), None if source is None else _spec(source)
    return lambda: _WORLD.Scatter(sent, received, 0)


def reduce_scatter(output: Array, array: Array, op: str = "SUM") -> Call:
    sent, received, operation = _spec(array), _spec(output), _operation(op)
    return lambda: _WORLD.Reduce_scatter_block(sent, received, operation)


def all_to_all(output: Array, array: Array) -> Call:
    sent, received = _spec(array), _spec(output)
    return lambda: _WORLD.Alltoall(sent, received)


def barrier() -> Call:
    return _WORLD.Barrier


def ping_pong(output: Array, array: Array) -> Call | None:
    """A round trip between ranks 0 and 1; None on other ranks."""
    sent, received, peer = _spec(array), _spec(output), 1 - _WORLD.rank

    def first() -> None:
        _WORLD.Send(sent, peer)
        _WORLD.Recv(received, peer)

    def second() -> None:
        _WORLD.Recv(received, peer)
        _WORLD.Send(sent, peer)

    return {0: first, 1: second}.get(_WORLD.rank)


def stream(output: Array, array: Array, window: int) -> Call | None:
    """``window`` messages in flight from rank 0 to 1, and a small one back; None on other ranks."""
    sent, received, done = _spec(array), _spec(output), _spec(np.zeros(1, dtype=np.float32))

    def first() -> None:
        MPI.Request.Waitall([_WORLD.Isend(sent, 1) for _ in range(window)])
        _WORLD.Recv(done, 1)

    def second() -> None:
        MPI.Request.Waitall([_WORLD.Irecv(received, 0) for _ in range(window)])
        _WORLD.Send(done, 0)

    return {0: first, 1: second}.get(_WORLD.rank)
