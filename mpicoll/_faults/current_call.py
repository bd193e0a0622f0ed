"""What this rank is doing, in words: for the last line of `mpicoll.run`, should this rank fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from mpicoll._base import last_words
from mpicoll._faults.group_state import GroupState
from mpicoll._faults.ledger import Entry
from mpicoll._tensors import signatures

MOST_NAMED = 4  # operations

# A blocking message under way: (operation, group, start time, group rank of the other side, or None for any rank)
Message = tuple[str, GroupState, float, "int | None"]
Messages = Mapping[int, Message]  # by thread
Groups = Callable[[], Iterable[GroupState]]


def write(messages: Messages, groups: Groups) -> None:
    """Writes it for the monitor of this rank. Does nothing under other launchers than `mpicoll.run`."""
    if last_words.monitored() is not None:
        last_words.doing(in_words(messages, groups), partial(_blocking, messages, groups))


def in_words(messages: Messages, groups: Groups) -> str:
    """Returns the operations under way, those that block the program first; without any, the last collective."""
    last = _last_collectives(groups)
    named = [f"it was in {words}" for _, words in _blocking(messages, groups)]
    named += [f"its {_collective(*each)}, was under way" for each in last if _runs(*each) and each[1][4]]
    if named:
        return " and ".join(named[:MOST_NAMED])
    return f"it was outside of collectives; its last was {_collective(*last[-1])}" if last else "it had begun no collective"


def _blocking(messages: Messages, groups: Groups) -> Iterator[tuple[str, str]]:
    """The operations in which a thread of the program is: name, and in words."""
    for group, entry in _last_collectives(groups):
        if _runs(group, entry) and not entry[4]:
            yield entry[1], f"its {_collective(group, entry)}{_lasted(entry[2])}"
    for operation, group, since, peer in list(messages.values()):
        side = "any rank" if peer is None else f"rank {group.global_ranks[peer]}"
        yield operation, f"{operation} on group {group.name!r} with {side}{_lasted(since)}"


def _last_collectives(groups: Groups) -> list[tuple[GroupState, Entry]]:
    """The last collective of each group, the one that began last at the end."""
    return sorted(((group, group.history[-1]) for group in groups() if group.history), key=lambda each: each[1][2])


def _runs(group: GroupState, entry: Entry) -> bool:
    return entry[0] > group.ended


def _collective(group: GroupState, entry: Entry) -> str:
    number, operation, _, signature, _ = entry
    return f"collective {number} on group {group.name!r}, {signatures.alike(operation, signature)[1]}"


def _lasted(since: float) -> str:
    seconds = time.monotonic() - since
    return f", for {seconds:.0f} s" if seconds >= 1 else ""
