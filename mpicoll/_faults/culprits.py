"""Says for which ranks an operation waits, and what they have done last, as far as the ledger of this node and answers tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpicoll._base import last_words, processes
from mpicoll._base.processes import ENDED, RUNS
from mpicoll._base.waits import PATIENCE_S
from mpicoll._faults import inquiries
from mpicoll._faults.call_comparison import MOST_GROUPS, NOTHING, PROGRAM_ENDED, Rank
from mpicoll._faults.group_state import EVERYBODY, GroupState, UnderWay
from mpicoll._faults.inquiries import Absent

MOST_NAMED = 4  # ranks that may send what a receive from any rank waits for
SPANS = "The group has ranks of several worlds: what they have done last is not known"


def of(operation: UnderWay) -> list[Absent]:
    """Returns the ranks of the world that an operation waits for."""
    _, group, _, peer, _, number = operation
    if group.spans:
        return []
    if peer == EVERYBODY:
        return sorted([*on_node(group, number), *inquiries.absent(group, number, group.unseen)])
    return of_any(group) if peer is None else of_message(group, peer)


def on_node(group: GroupState, number: int) -> list[Absent]:
    """Returns the members on this node that have not begun the collective of this number, or have left one half done."""
    found = []
    for rank in group.global_ranks:
        if rank == group.global_ranks[group.rank] or group.ledger is None or (known := group.ledger.read(rank)) is None:
            continue
        seen = known.groups.get(group.key)
        if seen is None or seen.begun < number or 0 < seen.left <= number:
            absent = _absent(group, rank, known)
            found.append(absent if seen is None or not seen.left else absent._replace(never=True))
    return found


def of_message(group: GroupState, peer: int) -> list[Absent]:
    """Returns the group rank that a message waits for."""
    rank = group.global_ranks[peer]
    known = None if group.ledger is None else group.ledger.read(rank)
    if known is not None:
        return [_absent(group, rank, known)]
    return (inquiries.absent(group, 0, [rank]) if rank in group.unseen else []) or [Absent(rank, "its calls are not known")]


def of_any(group: GroupState) -> list[Absent]:
    """Returns the members that a receive from any rank waits for."""
    return [absent for peer in range(group.size) if peer != group.rank for absent in of_message(group, peer)]


def other_side(group: GroupState, peer: int | None) -> str:
    """Returns the rank that a message waits for, in words. ``peer``: its group rank; None: any rank."""
    if group.spans:
        return SPANS if peer is None else f"It waits for rank {peer} of the group. {SPANS}"
    if peer is not None:
        return described(of_message(group, peer), "is the other side")
    more = f". And {group.size - 1 - MOST_NAMED} more" if group.size - 1 > MOST_NAMED else ""
    return f"It waits for any rank. {described(of_any(group)[:MOST_NAMED], 'is another side')}{more}"


def named(operation: UnderWay) -> str:
    """Returns the ranks that an operation waits for, in words."""
    return of_group(operation.group) if operation.peer == EVERYBODY else other_side(operation.group, operation.peer)


def also_waiting(group: GroupState, since: float) -> dict[int, int]:
    """The other ranks of this node that wait for a message since about the same time, and for which ranks; -1: for any rank."""
    own, ledger = group.global_ranks[group.rank], group.ledger
    boards = [] if ledger is None else [(rank, ledger.read(rank)) for rank in ledger.boards.ranks if rank != own]
    running = [(rank, known) for rank, known in boards if known is not None and processes.state(known.pid) == RUNS]
    return {rank: int(peer) for rank, known in running for begun, peer in known.messages if abs(begun - since) < PATIENCE_S}


def in_words(waiting: Mapping[int, int]) -> str:
    """These ranks as a sentence; empty if there are none."""
    pairs = [f"rank {rank} for {'any rank' if peer < 0 else f'rank {peer}'}" for rank, peer in waiting.items()]
    more = f", and {len(pairs) - MOST_NAMED} more" if len(pairs) > MOST_NAMED else ""
    return f". Other ranks of this node wait for messages, too: {', '.join(pairs[:MOST_NAMED])}{more}" if pairs else ""


def _absent(group: GroupState, rank: int, known: Rank) -> Absent:
    state, seen = processes.state(known.pid), known.groups.get(group.key)
    if seen is None and len(known.groups) >= MOST_GROUPS:
        last = "nothing is known of its calls on this group"
    else:
        last = str(seen or NOTHING)
    if known.over == PROGRAM_ENDED:
        return Absent(rank, inquiries.ended(0 if seen is None else seen.begun), True)
    if state == RUNS:
        return Absent(rank, f"{last}; its process {known.pid} runs", seen is not None and bool(seen.ending))
    return Absent(rank, f"its process {known.pid} {state}; up to a second before that {last}", state == ENDED, state == ENDED)


def described(absent: Sequence[Absent], verb: str = "has not come") -> str:
    """Returns a sentence for each of these ranks; empty if there are none."""
    said = ". ".join(f"Rank {rank} {verb}: {words}" for rank, words, *_ in absent)
    return last_words.about(absent[0].rank, said) if absent else ""


def of_group(group: GroupState) -> str:
    """Returns who has not come to the collective that the group is in; empty if that is not known."""
    if group.spans:
        return SPANS
    operation = group.under_way()
    absent = [] if operation is None else of(operation)
    if absent or operation is None or group.ledger is None:
        return described(absent)
    return f"Every rank of this node has begun its collective {operation.number} on this group; the calls may differ"
