"""What is under way in this process: the one table that the watchdog, last words and flight records read.

Only a blocking message writes an entry: a collective stands in the history of its group, and the poller has posted messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from mpicoll._base.facts import last_collective
from mpicoll._faults.group_state import GroupState, MessageWork, UnderWay
from mpicoll._tensors import signatures

MOST_NAMED = 4  # operations


class Table:
    """The groups of this process, and its operations. The only instance is ``table``.

    Attributes:
        groups: In the order in which they were made, until they are closed and their operations have ended. Copied by readers.
        inside: Blocking messages: (operation, group, start time, peer as in `UnderWay`). A thread has several while the handler
            of a signal, or a hook of the program, sends in the middle of one.
        posted: Returns the posted messages that have not ended.
    """

    def __init__(self) -> None:
        self.groups: dict[GroupState, None] = {}
        self.inside: dict[tuple[str, GroupState, float, int | None], None] = {}
        self.posted: Callable[[], Iterable[MessageWork]] = tuple

    def operations(self) -> list[UnderWay]:
        """Blocking messages, the collective of each group, and posted messages for which a thread waits, or has waited."""
        found = [UnderWay(*entry) for entry in list(self.inside)]
        found += filter(None, [group.under_way() for group in list(self.groups)])
        awaited = [(each, each.awaited) for each in self.posted()]
        found += [UnderWay(each.operation, each.group, since, each.peer, each) for each, since in awaited if since is not None]
        return found

    def in_words(self) -> str:
        """Returns the operations under way, those that block the program first; without any, the last collective."""
        shown = sorted(self.operations(), key=lambda each: each.work is not None)
        named = [_in_words(each) for each in shown if each.work is None or each.number]
        if named:
            return " and ".join(named[:MOST_NAMED])
        used = [group for group in list(self.groups) if group.history]
        if not used:
            return last_collective(0, None, None, "any group", was=True)
        return _collective(max(used, key=lambda group: group.history[-1][2]))

    def blocking(self) -> list[tuple[str, str]]:
        """The operations in which a thread of the program is: name, and in words."""
        return [(each.operation, _in_words(each)) for each in self.operations() if each.work is None]


def _in_words(operation: UnderWay) -> str:
    if operation.number:
        return _collective(operation.group)
    side = "any rank" if operation.rank is None else f"rank {operation.rank}"
    lasted_s = time.monotonic() - operation.since
    return f"it was in {operation.operation} on group {operation.group.name!r} with {side}, for {lasted_s:.0f} s"


def _collective(group: GroupState) -> str:
    """The last one of a group."""
    number, operation, since, signature, _ = group.history[-1]
    lasted_s = time.monotonic() - since if number > group.line.ended else None
    return last_collective(number, signatures.alike(operation, signature)[1], lasted_s, f"group {group.name!r}", was=True)


table = Table()
