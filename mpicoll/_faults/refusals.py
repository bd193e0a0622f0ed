"""Collectives that this rank has refused, while other ranks may have called them.

A program may catch the ValueError of a wrong argument and go on. If the other ranks have made the call, they wait in it, and the
next collective of this rank would meet them there, with the data of another operation. So:

    [1] a refusal is written to the board of this rank at once, with its place in the group's order
    [2] the next collective of this rank waits until it knows of every other rank of the node that it has refused the same, or
        that its collective at this place, begun or waiting here as well, is another one
    [3] a rank that has begun the refused operation waits for a rank that will not come: the watchdog ends the job (ledger.py)

If all ranks refuse alike, [2] takes no time. If this rank alone has tried something, [2] takes up to a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mpicoll._base.torch_errors import OperationTimeout
from mpicoll._faults.culprits import described, of_collective
from mpicoll._faults.group_state import GroupState
from mpicoll._faults.ledger import more_often

MOST = 8  # places of a group that are kept
LONGEST = 300  # characters of a refusal in words
NAP_S = 0.005  # between two looks at the boards


def add(group: GroupState, operation: str, error: Exception) -> None:
    """[1] Keeps a refusal. The caller then has the board written."""
    refused = group.refused_calls
    here = refused.setdefault(group.queue.issued() + 1, {})
    times, _ = here.get(operation, (0, ""))
    words = " ".join(str(error).split()).rstrip(".")
    here[operation] = times + 1, f"{operation}, refused: {type(error).__name__}: {words}"[:LONGEST]
    if len(refused) > MOST:
        del refused[next(iter(refused))]
    if not group.unsettled:
        group.unsettled = True
        group.queue.hold()


def before(group: GroupState, rank: int, number: int, call: str) -> str:
    """Returns a rank's call in words, with what it has refused at this place of the order before, as far as that is known.

    An error that the program has caught on one rank is why the calls of the ranks differ from there on.
    """
    if rank == group.global_ranks[group.rank]:
        refused = group.refused_calls.get(number, {})
    else:
        known = None if group.ledger is None else group.ledger.read(rank)
        seen = None if known is None else known.groups.get(group.key)
        refused = {} if seen is None else seen.refused.get(str(number), {})
    return " after ".join([call, *(text for _, text in reversed(refused.values()))])


def settle(group: GroupState, operation: str, write: Callable[[], None]) -> None:
    """[2] Waits for the other ranks of the node, unless ``operation`` moves no data.

    Args:
        write: Writes the board of this rank.

    Raises:
        OperationTimeout: A rank did not come to this place within the timeout of the group.
    """
    if operation not in ("barrier", "monitored_barrier"):
        deadline, number = time.monotonic() + group.timeout_s, max(group.refused_calls)
        group.next_call = number, operation
        write()
        while not _settled(group, number):
            if time.monotonic() > deadline:
                missing = described(of_collective(group, number))
                raise OperationTimeout(f"{group.where(operation)}: Timed out: this rank has refused a call before. {missing}")
            time.sleep(NAP_S)
    group.next_call = 0, ""
    if group.unsettled:
        group.unsettled = False
        group.queue.hold(-1)


def _settled(group: GroupState, number: int) -> bool:
    assert group.ledger is not None
    own = group.refused_calls[number]
    for rank in group.global_ranks:
        if rank == group.global_ranks[group.rank] or rank not in group.ledger.boards.ranks:
            continue
        known = group.ledger.read(rank)
        seen = None if known is None else known.groups.get(group.key)
        theirs = {} if seen is None else seen.refused.get(str(number), {})
        waits = "" if seen is None or seen.next[0] != number else seen.next[1]
        call = "" if known is None else known.call(group.key, number) or waits
        asked = [call] if call else list(own)
        if (not call and not theirs) or any(more_often(each, own, theirs) for each in asked):
            return False
    return True
