"""What must be alike on all ranks of a collective: comparison of the ranks' calls, and words for them.

A signature (`calls.Signature`) is a tuple that costs nothing to make. `Facts` is the same as plain values, which another rank can
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpicoll._tensors.calls import Signature
from mpicoll._tensors.plans import Plan

Blocks = dict[int, int]  # bytes, by group rank


class Facts(NamedTuple):
    """A rank's call of a collective. ``refusal``: the error that it raised before it communicated."""

    operation: str
    reduction: str = ""
    dtype: str = ""
    nbytes: int | None = None
    root: int | None = None
    sizes: tuple[int, ...] = ()  # of each rank's block, where every rank knows them
    sends: Blocks | None = None  # to and from each rank, where only the two know them
    receives: Blocks | None = None
    parts: tuple[Facts, ...] = ()  # of a coalesced operation
    device: str = "cpu"  # kind of device
    refusal: str = ""

    def __str__(self) -> str:
        if self.refusal:
            return f"{self.operation}, refused: {self.refusal}"
        words = [word for word in (self.reduction, self.dtype) if word]
        if self.nbytes is not None:
            words.append(f"{self.nbytes} bytes")
        if self.sizes and min(self.sizes) != max(self.sizes):
            words.append(f"blocks of {list(self.sizes)} bytes")
        if self.root is not None:
            words.append(f"root {self.root}")
        words += [f"to rank {rank}: {nbytes} bytes" for rank, nbytes in (self.sends or {}).items()]
        words += [f"from rank {rank}: {nbytes} bytes" for rank, nbytes in (self.receives or {}).items()]
        words += [str(part) for part in self.parts]
        if self.device != "cpu":
            words.append(f"on {self.device}")
        return f"{self.operation}({', '.join(words)})"


def facts(operation: str, signature: Signature) -> Facts:
    """Returns a signature's plain values."""
    what, nbytes, root, sizes = (*signature, None, None, None, None)[:4]
    if isinstance(sizes, list):
        return Facts(operation, parts=tuple(facts("", part) for part in sizes))
    reduction, dtype = (what.op_name, what.dtype) if isinstance(what, Plan) else ("", what)
    known = Facts(operation, reduction, "" if dtype is None else str(dtype).removeprefix("torch."), nbytes, root)
    if sizes is None:
        return known
    if isinstance(sizes[0], list):
        return known._replace(sends=_blocks(sizes[0]), receives=_blocks(sizes[1]))
    return known._replace(sizes=sizes)


def _blocks(listed: Sequence[tuple[int, object]]) -> Blocks:
    """The sizes of [(rank, (address, bytes)), ...], or of [(address, bytes), ...] by rank."""
    if listed and isinstance(listed[0][1], tuple):
        return {rank: block[1] for rank, block in listed}  # type: ignore[index]
    return {rank: nbytes for rank, (_, nbytes) in enumerate(listed)}  # type: ignore[misc]


def difference(calls: Sequence[Facts]) -> str:
    """Returns what is wrong if these are the ranks' calls of one collective, or an empty string.

    If all ranks have refused their arguments, nothing is wrong: each of them raises its own error.
    """
    refused = [rank for rank, call in enumerate(calls) if call.refusal]
    if len(refused) == len(calls):
        return ""
    shared = {call._replace(sends=None, receives=None) for call in calls}
    if len(shared) == 1:
        pairs = [
            (sender, receiver)
            for sender, call in enumerate(calls)
            for receiver, nbytes in (call.sends or {}).items()
            if nbytes != (calls[receiver].receives or {}).get(sender)
        ]
        if not pairs:
            return ""
    by_call: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        by_call.setdefault(str(call), []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in by_call.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
