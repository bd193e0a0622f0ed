"""Converts names of MPI datatypes and operations to handles, and byte counts to (count, datatype)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from mpicoll._mpi.library import MPI

INT_MAX = 2**31 - 1  # elements; the largest count that Open MPI 5.0 accepts
_UNIT = 1 << 20  # bytes in one block of a large datatype

BYTE = MPI.BYTE

fromaddress = MPI.buffer.fromaddress
allocate = MPI.buffer.allocate


def predefined(name: str) -> Any:
    """The predefined datatype or reduction of this name: "INT32_T" gives MPI_INT32_T, "SUM" gives MPI_SUM."""
    return getattr(MPI, name)


@lru_cache(maxsize=64)
def _large(nbytes: int) -> MPI.Datatype:
    """One datatype of ``nbytes`` contiguous bytes. Its signature is plain bytes, so it matches any count of MPI_BYTE."""
    blocks, rest = divmod(nbytes, _UNIT)
    unit = MPI.BYTE.Create_contiguous(_UNIT)
    many = unit.Create_contiguous(blocks)
    whole = MPI.Datatype.Create_struct([1, rest], [0, blocks * _UNIT], [many, MPI.BYTE]).Commit()
    unit.Free()
    many.Free()
    return whole


def spec(address: int, nbytes: int) -> list[Any]:
    """Describes memory to MPI as one message of any size, so that large messages need no protocol of their own."""
    memory = fromaddress(address, nbytes)
    if nbytes <= INT_MAX:
        return [memory, nbytes, MPI.BYTE]
    return [memory, 1, _large(nbytes)]


def room(address: int, nbytes: int) -> list[Any]:
    """Describes the memory of a receive, one byte where it has none.

    Intel MPI 2021.18 takes a message of some kilobytes into a receive of no bytes without an error, and its status says 0 bytes.
    """
    return spec(address, nbytes) if nbytes else [bytearray(1), 1, MPI.BYTE]


def post(function: Callable[..., MPI.Request], header: bytearray | None, content: list[Any], *envelope: int) -> MPI.Request:
    """Posts one message: ``header``, if there is one, and behind it ``content``. Both must live until the message has ended.

    Args:
        function: Isend or Irecv, whose last arguments are ``envelope``.
        content: As `spec` or `room` describes it.
    """
    if header is None:
        return function(content, *envelope)
    memory, count, datatype = content
    places = [MPI.Get_address(header), MPI.Get_address(memory)]
    whole = MPI.Datatype.Create_struct([len(header), count], places, [MPI.BYTE, datatype]).Commit()
    try:
        return function([MPI.BOTTOM, 1, whole], *envelope)
    finally:
        whole.Free()  # MPI keeps it until the message has ended
