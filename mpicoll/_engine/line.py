"""The line of a group: its collectives run one at a time, take their numbers, and show them to the other ranks.

A collective of the program that finds the line free runs at once, in its thread; the others wait in the group's queue. Each takes
the same steps here. A collective of 8 bytes takes 3 us, of which MPI takes 1. So all that it needs is in one object with slots.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from torch.autograd import profiler

from mpicoll._base.errors import CollectiveMismatch, MpicollError
from mpicoll._faults.call_comparison import REMEMBERED, Entry
from mpicoll._faults.late_ranks import CALL_BITS, Nobody
from mpicoll._mpi import bell
from mpicoll._tensors.calls import Call, Signature


class Group(Protocol):
    """What the line asks of its group (`_engine/group.py`)."""

    def attend(self, operation: str, signature: Signature, number: int) -> None: ...

    def failure_of(self, operation: str, begun: Callable[..., object] | None, raw: BaseException) -> BaseException: ...


class Line:
    """The order of a group's collectives.

    Attributes:
        running: Held by the thread that is inside a collective.
        pending: Queued collectives that have not ended, their callbacks included.
        broken: The error that later use of the group raises; None: the group can be used.
        history: The last collectives that have begun, the one under way at the end.
        started: Number of collectives that have begun; becomes equal on all ranks.
        ended: Number of the last one that has ended on this rank.
        group: The group, once it has been made.
    """

    __slots__ = (
        "_enter", "_leave", "_members", "_place", "_record", "_wanted", "_words",
        "broken", "ended", "group", "history", "pending", "running", "started",
    )  # fmt: skip

    group: Group

    def __init__(self) -> None:
        self.running = threading.Lock()
        self.history: deque[Entry] = deque(maxlen=REMEMBERED)
        self.broken: MpicollError | None = None
        self.pending = self.started = self.ended = 0
        self._enter, self._leave, self._record = self.running.acquire, self.running.release, self.history.append
        self.show(Nobody())

    def show(self, members: Nobody) -> None:
        """From now on shows the numbers to these members of the group."""
        self._members, self._words, self._place, self._wanted = members, members.words, members.place, members.wanted

    def now(self, operation: str, call: Call, background: bool | None = None) -> bool:
        """Carries out a collective in this thread, if the line is free. Otherwise does nothing and returns False.

        Args:
            background: None: it begins now, or not at all. Otherwise its turn has come: the queue has counted it and holds
                ``running`` for this thread. True: this is the thread of the queue.

        Raises:
            MpicollError: MPI's error. The group is unusable afterwards.
        """
        if background is None and (
            self.pending or self.broken is not None or profiler._is_profiler_enabled or not self._enter(False)
        ):
            return False
        try:  # from here on: the handler of a signal may raise anywhere
            number = self.started = self.started + (background is None)
            now = monotonic()
            function, arguments, signature = call
            due = now > self._members.due
            self._words[self._place] = self._members.word(operation, signature, number) if due else number << CALL_BITS
            if self._words[self._wanted]:
                bell.bell.come()
            self._record((number, operation, now, signature, background))
            if due:
                self.group.attend(operation, signature, number)
            call = None  # type: ignore[assignment]  # it has begun
            function(*arguments)
        except BaseException as raw:
            if call and not (self.history and self.history[-1][0] == self.started):  # the others read there who has left it
                self._record((self.started, operation, monotonic(), call[2], background))
            if (error := self.group.failure_of(operation, None if call else function, raw)) is raw:
                raise
            raise error from (None if isinstance(error, CollectiveMismatch) else raw)
        finally:
            self.ended = self.started
            if background is None:
                self._leave()
        return True
