"""Objects of this worker that references on other workers point to, with the weight of those references (see rref.py)."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

Id = tuple[int, int]  # rank of the worker that made a reference or passed on a copy of it, and that worker's count
Weight = tuple[Id, int]  # a unit of weight by its name, and how many of its parts
WHOLE = 1 << 62  # parts of a unit


@dataclass(eq=False)
class Entry:
    id: Id
    value: Future[Any] = field(default_factory=Future)  # the object, or the error that its creation raised
    outside: Counter[Id] = field(default_factory=Counter)  # parts of each unit that references on other workers have
    is_made: bool = False  # the call that creates the object has run


class OwnedObjects:
    """The entries of one worker, by id."""

    def __init__(self, rank: int) -> None:
        self.guard = threading.RLock()  # guards the entries, and the weight of every reference of this worker
        self._rank = rank
        self._entries: dict[Id, Entry] = {}
        self._count = itertools.count()

    def new_id(self) -> Id:
        return self._rank, next(self._count)

    def entry(self, identity: Id) -> Entry:
        """Returns the entry of this id. Adds it if a user asks before the call that creates the object has come."""
        with self.guard:
            return self._entries.setdefault(identity, Entry(identity))

    def give(self, entry: Entry, weight: Weight) -> None:
        """Counts weight that other workers have. Without any, only RRefs on this worker keep the object alive."""
        unit, parts = weight
        with self.guard:
            entry.outside[unit] += parts
            if not entry.outside[unit]:
                del entry.outside[unit]
            if entry.outside or not entry.is_made:
                self._entries[entry.id] = entry
            else:
                self._entries.pop(entry.id, None)

    def take_back(self, entry: Entry, weight: Weight) -> None:
        unit, parts = weight
        self.give(entry, (unit, -parts))

    def forget(self, identity: Id) -> None:
        """Removes the entry of a reference whose call could not be sent."""
        with self.guard:
            self._entries.pop(identity, None)

    def all(self) -> list[Entry]:
        """Returns the objects that other workers refer to, and those that are still being created."""
        with self.guard:
            return list(self._entries.values())


def id_text(identity: Id) -> str:
    return f"GloballyUniqueId(created_on={identity[0]}, local_id={identity[1]})"
