"""Objects that references point to, at their owner, and how much of their weight is with users elsewhere (see rref.py)."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch.futures import Future

from mpicoll.rpc.workers import WorkerInfo

Id = tuple[int, int]  # worker that made a reference, or gave a copy of it away, and its count

guard = threading.RLock()  # guards the entries
_owned: dict[Id, Entry] = {}
_count = itertools.count()


_me: WorkerInfo | None = None


def me() -> WorkerInfo:
    """This worker."""
    assert _me is not None
    return _me


@dataclass(eq=False)
class Entry:
    """An object at its owner. ``outside``: the weight that is with users; ``value``: the object, or why there is none."""

    id: Id
    value: Future[Any] = field(default_factory=Future)
    outside: Fraction = Fraction(0)
    made: bool = False  # the call that makes it has come


def begin(worker: WorkerInfo | None) -> None:
    """Forgets all of them; ids begin anew, on this worker."""
    global _count, _me
    _me = worker
    with guard:
        _owned.clear()
        _count = itertools.count()


def new_id(worker: int) -> Id:
    """For a reference that this worker makes, or for a copy of one that it gives away."""
    return worker, next(_count)


def written(identity: Id) -> str:
    """An id as torch writes it."""
    return f"GloballyUniqueId(created_on={identity[0]}, local_id={identity[1]})"


def entry_of(identity: Id) -> Entry:
    """The entry of this id; makes it if a user comes before the call that makes the object."""
    with guard:
        return _owned.setdefault(identity, Entry(identity))


def change(entry: Entry, weight: Fraction) -> None:
    """More weight has gone out (or less is out); an entry that nobody outside knows is kept by the owner's own RRefs only."""
    with guard:
        entry.outside += weight
        if entry.outside == 0 and entry.made:
            _owned.pop(entry.id, None)
        else:
            _owned[entry.id] = entry


def forget(identity: Id) -> None:
    """For a reference whose call was never sent."""
    with guard:
        _owned.pop(identity, None)


def owned() -> list[Entry]:
    """The objects that users elsewhere know, or that are still being made."""
    with guard:
        return list(_owned.values())
