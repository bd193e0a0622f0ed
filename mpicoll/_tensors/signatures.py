"""What must be alike on all ranks of a collective, as plain values, which another rank can read.

A signature (`calls.Signature`) is a tuple that costs nothing to make. `Facts` is the same as plain values.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

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


_known: dict[tuple[str, Signature], tuple[int, str]] = {}  # results of `alike`


def alike(operation: str, signature: Signature) -> tuple[int, str]:
    """Returns what all ranks must have alike: as a number that is equal for equal calls, and in words.

    Refusals of one operation are alike whatever their errors say, which may name the rank.
    """
    if isinstance(signature, Refused):
        return zlib.crc32(f"{operation}, refused".encode()), str(facts(operation, signature))
    if len(signature) > 3 and isinstance(signature[3], tuple) and isinstance(signature[3][0], list):
        signature = signature[:3]  # of blocks whose size only sender and receiver know
    try:
        return _known[operation, signature]
    except (KeyError, TypeError):  # a coalesced operation has a list in its signature
        text = str(facts(operation, signature))
        description = zlib.crc32(text.encode()), text
    if not isinstance(signature[-1] if signature else None, list):
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[operation, signature] = description
    return description


def _blocks(listed: Sequence[tuple[int, object]]) -> Blocks:
    """The sizes of [(rank, (address, bytes)), ...], or of [(address, bytes), ...] by rank."""
    if listed and isinstance(listed[0][1], tuple):
        return {rank: block[1] for rank, block in listed}  # type: ignore[index]
    return {rank: nbytes for rank, (_, nbytes) in enumerate(listed)}  # type: ignore[misc]
