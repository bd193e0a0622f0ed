"""What an operation says about itself to other ranks, which compare it.

A collective: its signature (`calls.Signature`), a tuple that costs nothing to make, and the same as plain values (`Facts`).

A message of a checked group (MPICOLL_CHECK=1): a header, in front of the tensor and in the same message. MPI compares neither
dtypes nor sizes: float32 arrives as int32, and a message that is too short fills the front. Only the receiver can notice it, once
the message has come.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mpicoll._base.facts import Blocks, Facts
from mpicoll._tensors.calls import Signature

MOST_KNOWN = 4096  # calls whose description is kept
LONGEST = 300  # characters of an error in words


class Refused(NamedTuple):
    """The signature of a call whose arguments this rank has refused."""

    error: str


def refused(error: Exception) -> Refused:
    """Returns the signature of a call that has raised this error before it communicated."""
    return Refused(f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")[:LONGEST])


HEADER = struct.Struct("q24s")  # bytes of the tensor, name of its dtype


def facts(operation: str, signature: Signature) -> Facts:
    """Returns a signature's plain values."""
    if isinstance(signature, Refused):
        return Facts(operation, refusal=signature.error)
    what, nbytes, root, sizes = (*signature, None, None, None, None)[:4]
    if isinstance(sizes, list):
        return Facts(operation, parts=tuple(facts("", part) for part in sizes))
    reduction, dtype = ("", what) if what is None or isinstance(what, torch.dtype) else (what.op_name, what.dtype)
    known = Facts(operation, reduction, "" if dtype is None else str(dtype).removeprefix("torch."), nbytes, root)
    if sizes is None:
        return known
    if isinstance(sizes[0], list):
        return known._replace(sends=_blocks(sizes[0]), receives=_blocks(sizes[1]))
    return known._replace(sizes=sizes)


@lru_cache(MOST_KNOWN)
def _described(operation: str, signature: Signature) -> tuple[int, Facts]:
    call = facts(operation, signature)
    return zlib.crc32(str(call).encode()), call


def alike(operation: str, signature: Signature) -> tuple[int, Facts]:
    """Returns what all ranks must have alike: as a number that is equal for equal calls, and as values.

    Refusals of one operation are alike whatever their errors say, which may name the rank.
    """
    if isinstance(signature, Refused):
        return zlib.crc32(f"{operation}, refused".encode()), facts(operation, signature)
    if len(signature) > 3 and isinstance(signature[3], tuple) and isinstance(signature[3][0], list):
        signature = signature[:3]  # of blocks whose size only sender and receiver know
    try:
        return _described(operation, signature)
    except TypeError:  # a coalesced operation has a list in its signature
        return _described.__wrapped__(operation, signature)


def _blocks(listed: Sequence[tuple[int, object]]) -> Blocks:
    """The sizes of [(rank, (address, bytes)), ...], or of [(address, bytes), ...] by rank."""
    if listed and isinstance(listed[0][1], tuple):
        return {rank: block[1] for rank, block in listed}  # type: ignore[index]
    return {rank: nbytes for rank, (_, nbytes) in enumerate(listed)}  # type: ignore[misc]


def header(tensor: Tensor) -> bytes:
    return HEADER.pack(tensor.nbytes, str(tensor.dtype).removeprefix("torch.").encode())


def difference(sent: bytes | bytearray, expected: bytes) -> str:
    """Returns what is wrong with a message that has the first header if its receive has the second one, or an empty string."""
    return "" if sent == expected else f"the message has {_in_words(sent)}, and its tensor {_in_words(expected)}"


def _in_words(header: bytes | bytearray) -> str:
    nbytes, name = HEADER.unpack(header)
    return f"{nbytes} bytes of {name.rstrip(bytes(1)).decode()}"
