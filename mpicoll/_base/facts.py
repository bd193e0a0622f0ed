"""A rank's call of a collective as plain values: what the ranks compare, and the words for it. Needs no torch."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST_LISTED = 16  # sizes
MOST_PAIRS = 4
Blocks = dict[int, int]  # bytes, by group rank
DTYPE = re.compile(r"(?:b?float|u?int|complex|bool)(\d*)\w*")  # its bits
UNKNOWN = "another call"  # the operation of a call of which nothing else is known


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
        if self.operation == UNKNOWN:
            return UNKNOWN
        if self.refusal:
            return f"{self.operation}, refused: {self.refusal}"
        words = [word for word in (self.reduction, self.dtype) if word]
        if self.nbytes is not None:
            words.append(self.amount(self.nbytes))
        if blocks := self.blocks():
            words.append(f"blocks of {_listed(blocks)} {self._unit()}s")
        if self.root is not None:
            words.append(f"root {self.root}")
        words += [f"to rank {rank}: {self.amount(nbytes)}" for rank, nbytes in (self.sends or {}).items()]
        words += [f"from rank {rank}: {self.amount(nbytes)}" for rank, nbytes in (self.receives or {}).items()]
        words += [str(part) for part in self.parts]
        if self.device != "cpu":
            words.append(f"on {self.device}")
        return f"{self.operation}({', '.join(words)})"

    def blocks(self) -> list[int]:
        """Elements of each rank's block, where they differ. The tensors of a coalesced operation may differ in number alone."""
        shown = self.sizes and (self.operation == "" or min(self.sizes) != max(self.sizes))
        return [nbytes // self._itemsize() for nbytes in self.sizes] if shown else []

    def aspects(self) -> dict[str, list[object]]:
        """What calls of one collective may differ in; of a coalesced one, for each of its tensors."""
        calls = (self, *self.parts)
        return {
            "the reduction": [call.reduction for call in calls],
            "the dtype": [call.dtype for call in calls],
            "the number of elements": [call.nbytes and call.nbytes // call._itemsize() for call in calls],
            "the sizes of the blocks": [call.blocks() for call in calls],
            "the root": [call.root for call in calls],
            "the kind of device": [call.device for call in calls],
        }

    def _itemsize(self) -> int:
        """Bytes of an element; 1 if the dtype is not known."""
        found = DTYPE.fullmatch(self.dtype)
        return max(1, int(found[1] or 8) // 8) if found else 1

    def _unit(self) -> str:
        return "element" if DTYPE.fullmatch(self.dtype) else "byte"

    def amount(self, nbytes: int) -> str:
        """So many elements in words; bytes if the dtype is not known."""
        count = nbytes // self._itemsize()
        return f"{count} {self._unit()}{'' if count == 1 else 's'}"

    def as_json(self) -> dict[str, Any]:
        """Returns the values that are not the default, as an object for JSON."""
        values = {name: value for name, value in self._asdict().items() if value != self._field_defaults.get(name)}
        return {**values, **({"parts": [part.as_json() for part in self.parts]} if self.parts else {})}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Facts:
        """Returns what `as_json` has written. Other keys of ``values`` are ignored."""
        known = {name: values[name] for name in cls._fields if name in values}
        for name in ("sends", "receives"):
            if known.get(name) is not None:
                known[name] = {int(rank): nbytes for rank, nbytes in known[name].items()}
        known["sizes"] = tuple(known.get("sizes", ()))
        known["parts"] = tuple(cls.from_json(part) for part in known.get("parts", ()))
        return cls(**known)


def last_collective(number: int, call: Facts | None, lasted_s: float | None, group: str = "this group", was: bool = False) -> str:
    """Returns what a rank has done last on a group, in words. ``call``: None: it has begun no collective.

    ``lasted_s``: for how long the rank has been in it; None: it has ended. ``was``: the rank itself has ended since.
    """
    is_, has = ("was", "had") if was else ("is", "has")
    if call is None:
        return f"it {has} begun no collective on {group}"
    if lasted_s is None:
        return f"its last collective on {group} {is_} number {number}, {call}, which {has} ended"
    return f"it {is_} in its collective {number} on {group}, {call}, for {lasted_s:.0f} s"


def _listed(sizes: list[int]) -> str:
    """All of a few sizes; of many the first ones and a checksum."""
    checksum = f", ...] ({len(sizes)}, checksum {zlib.crc32(repr(sizes).encode()):x})"
    return str(sizes) if len(sizes) <= MOST_LISTED else str(sizes[:MOST_LISTED])[:-1] + checksum


def difference(calls: Mapping[int, Facts]) -> str:
    """Returns what is wrong if these are the ranks' calls at one place of their order, by group rank, or an empty string.

    If all ranks have refused their arguments, nothing is wrong: each of them raises its own error.
    """
    if all(call.refusal for call in calls.values()):
        return ""
    shared = {call._replace(sends=None, receives=None) for call in calls.values()}
    if len(shared) == 1:
        pairs = [
            (sender, receiver)
            for sender, call in calls.items()
            for receiver, nbytes in (call.sends or {}).items()
            if receiver in calls and nbytes != (calls[receiver].receives or {}).get(sender)
        ]
        if not pairs:
            return ""
        said = "; ".join(_pair(calls, *pair) for pair in pairs[:MOST_PAIRS])
        return f"{said}{'; ...' * (len(pairs) > MOST_PAIRS)}. {_capital(in_words(calls))}"
    return mismatch(calls)


def _pair(calls: Mapping[int, Facts], sender: int, receiver: int) -> str:
    sends, expects = (calls[sender].sends or {})[receiver], (calls[receiver].receives or {}).get(sender, 0)
    amount = calls[sender].amount
    return f"rank {sender} sends {amount(sends)} to rank {receiver}, which expects {amount(expects)}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def mismatch(calls: Mapping[int, Facts]) -> str:
    """Returns, for calls that differ: in what, each call, and what all ranks must do. ``calls``: by rank."""
    what, remedy = what_differs(calls)
    return ". ".join(filter(None, [what, _capital(in_words(calls)), remedy]))


def what_differs(calls: Mapping[int, Facts]) -> tuple[str, str]:
    """Returns in what these calls differ, and what all ranks must do; the latter is empty after a refusal."""
    if refused := [rank for rank, call in calls.items() if call.refusal]:
        return f"{ranks_in_words(refused)} refused the arguments", ""
    first, *others = calls.values()
    if any(call.operation != first.operation for call in others):
        return "the ranks call different collectives", "All ranks must call the same collectives in the same order"
    if any(len(call.parts) != len(first.parts) for call in others):
        return f"the ranks' calls of {first.operation} differ in the number of tensors", "All ranks must agree on it"
    differ = [aspect for aspect, value in first.aspects().items() if any(call.aspects()[aspect] != value for call in others)]
    what = " and ".join(differ) or "the arguments"
    return f"the ranks' calls of {first.operation} differ in {what}", f"All ranks must agree on {what}"


def in_words(calls: Mapping[int, Facts]) -> str:
    """Returns the calls by rank, equal ones together."""
    by_call: dict[str, list[int]] = {}
    for rank in sorted(calls):
        by_call.setdefault(str(calls[rank]), []).append(rank)
    return "; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in by_call.items())


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Names ranks in words: ``rank 1``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words = ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {words}"
