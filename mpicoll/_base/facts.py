"""A rank's call of a collective as plain values: what the ranks compare, and the words for it. Needs no torch."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MOST_LISTED = 16  # sizes
MOST_PAIRS = 4
Blocks = dict[int, int]  # bytes, by group rank
DTYPE = re.compile(r"\b((?:b?float|u?int|complex|bool)(\d*)\w*)")  # its name, its bits
# What calls of one collective may differ in, and where it stands in the words of a call.
ASPECTS = {
    "the reduction": r"\(([A-Z_]+)[,)]",
    "the dtype": DTYPE.pattern,
    "the number of elements": r"(\d+) (?:elements?|bytes)",
    "the sizes of the blocks": r"blocks of (\[.*?\])",
    "the root": r"root (\d+)",
    "the kind of device": r"\bon (\w+)",
}


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
            words.append(self.amount(self.nbytes))
        part = not self.operation  # of a coalesced operation: its tensors may differ in number alone
        if self.sizes and (part or min(self.sizes) != max(self.sizes)):
            words.append(f"blocks of {_listed(tuple(nbytes // self._itemsize() for nbytes in self.sizes))} {self._unit()}s")
        if self.root is not None:
            words.append(f"root {self.root}")
        words += [f"to rank {rank}: {self.amount(nbytes)}" for rank, nbytes in (self.sends or {}).items()]
        words += [f"from rank {rank}: {self.amount(nbytes)}" for rank, nbytes in (self.receives or {}).items()]
        words += [str(part) for part in self.parts]
        if self.device != "cpu":
            words.append(f"on {self.device}")
        return f"{self.operation}({', '.join(words)})"

    def _itemsize(self) -> int:
        """Bytes of an element; 1 if the dtype is not known."""
        found = DTYPE.fullmatch(self.dtype)
        return max(1, int(found[2] or 8) // 8) if found else 1

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


def _listed(sizes: tuple[int, ...]) -> str:
    """All of a few sizes; of many the first ones and a checksum, because a rank's board has a limit."""
    if len(sizes) <= MOST_LISTED:
        return str(list(sizes))
    first = ", ".join(map(str, sizes[:MOST_LISTED]))
    return f"[{first}, ...] ({len(sizes)}, checksum {zlib.crc32(repr(sizes).encode()):x})"


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


def mismatch(calls: Mapping[int, object]) -> str:
    """Returns, for calls that differ: in what, each call, and what all ranks must do. ``calls``: by rank, also as words."""
    what, remedy = what_differs(calls)
    return ". ".join(filter(None, [what, _capital(in_words(calls)), remedy]))


def what_differs(calls: Mapping[int, object]) -> tuple[str, str]:
    """Returns in what these calls differ, and what all ranks must do; the latter is empty after a refusal."""
    texts = {rank: str(call) for rank, call in calls.items()}
    if refused := [rank for rank, text in texts.items() if ", refused: " in text]:
        return f"{ranks_in_words(sorted(refused))} refused the arguments", ""
    operations = {text.partition("(")[0] for text in texts.values()}
    if len(operations) > 1:
        return "the ranks call different collectives", "All ranks must call the same collectives in the same order"
    if len({text.count("(") for text in texts.values()}) > 1:
        return f"the ranks' calls of {operations.pop()} differ in the number of tensors", "All ranks must agree on it"
    differ = [aspect for aspect, place in ASPECTS.items() if len({tuple(re.findall(place, text)) for text in texts.values()}) > 1]
    what = " and ".join(differ) or "the arguments"
    return f"the ranks' calls of {operations.pop()} differ in {what}", f"All ranks must agree on {what}"


def in_words(calls: Mapping[int, object]) -> str:
    """Returns the calls by rank, equal ones together."""
    by_call: dict[str, list[int]] = {}
    for rank in sorted(calls):
        by_call.setdefault(str(calls[rank]), []).append(rank)
    return "; ".join(f"{ranks_in_words(ranks)}: {text}" for text, ranks in by_call.items())


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
