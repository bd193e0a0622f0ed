"""The state of a group: its name, its ranks, its queue, and whether it can still be used."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from mpicoll._base.errors import MpicollError
from mpicoll._base.group_errors import GroupFailed, OperationTimeout, PeerLost
from mpicoll._base.waits import PATIENCE_S
from mpicoll._faults.call_comparison import Entry, Ledger, Line
from mpicoll._faults.late_ranks import Looks, Nobody
from mpicoll._mpi.channel import Channel

EVERYBODY = -1  # the peer of a collective
TESTED_S = 5e-3  # seconds between two sends that are tested, in a quick succession; such a send takes 10 us longer


class Work(Protocol):
    """What is read here of the handle of an asynchronous operation (`_engine/work.py`)."""

    awaited: float | None

    def overdue(self, now: float) -> bool: ...

    def expire(self, limit_s: float | None = None, reason: str = "") -> None: ...


class Order(Protocol):
    """What is read here of a group's queue (`_engine/queue.py`)."""

    @property
    def line(self) -> Line: ...

    @property
    def work(self) -> Work | None: ...

    def works(self) -> Sequence[Work]: ...

    def issued(self) -> int: ...


class MessageWork(Work, Protocol):
    """What is read here of a message that has been posted (`_engine/requests.py`)."""

    group: GroupState
    operation: str
    tensor: Tensor
    peer: int | None


class UnderWay(NamedTuple):
    """An operation under way. ``since``: of a posted message, when a thread first waited for it. ``number``: of a collective.

    ``peer``: the group rank that it waits for; None: any rank; EVERYBODY: a collective. ``work``: None: it blocks its thread.
    """

    operation: str
    group: GroupState
    since: float
    peer: int | None
    work: Work | None = None
    number: int = 0

    @property
    def rank(self) -> int | None:
        """The global rank that it waits for; None: any, or all."""
        return None if self.peer in (None, EVERYBODY) else self.group.global_ranks[self.peer]


@dataclass(eq=False, repr=False, kw_only=True)
class GroupState:
    """One process group, seen from one of its ranks."""

    checked: ClassVar[bool] = False  # ranks compare their calls before each collective
    reconfigurable = False  # after a failure the ranks make another communicator: what waits need not begin in MPI

    name: str
    channel: Channel
    global_ranks: tuple[int, ...]  # of each group rank
    timeout_s: float  # of operations without a timeout of their own
    queue: Order  # keeps the order of the group's collectives
    closer: Callable[[Any], None]  # called with the group
    # Called when an operation has taken longer than its timeout, with the reason and whether the job ends; otherwise an error is
    # raised. Must not raise.
    expired: Callable[[str, bool], None]
    key: str  # a name that is equal on all members
    ledger: Ledger | None  # None: the ranks of the node cannot see each other's calls
    attendance: Nobody
    raises: bool  # a blocking operation raises at its timeout, where the job would end
    unseen: tuple[int, ...]  # members whose calls are not on a board of this node; ranks of the world
    spans: bool = False  # it has ranks of several worlds: ``global_ranks`` are its own numbers, and nobody is asked
    failure: Exception | None = field(default=None, init=False)  # what has failed first; None: nothing
    abort_hooks: dict[int, Callable[[], object]] = field(default_factory=dict, init=False)  # of the program, by their numbers
    left: int = field(default=0, init=False)  # number of the collective that an exception has left half done; 0: none
    ending: str = field(default="destroyed", init=False)  # what `close` does to it, in a word for the other ranks
    # What inquiries.py knows of the other ranks, by the number of a collective, of which it keeps the last; 0: of messages.
    waits: dict[int, Any] = field(default_factory=dict, init=False)
    named: tuple[str, float] | None = field(default=None, init=False)  # the last wait of which the watchdog has said who is late
    patience_s: float = field(default=PATIENCE_S, init=False)  # until it says so of another one
    sends: Looks = field(default_factory=lambda: Looks(TESTED_S), init=False)
    receives: Looks = field(default_factory=Looks, init=False)

    def __post_init__(self) -> None:
        self.rank: int = self.channel.comm.Get_rank()
        self.size: int = self.channel.comm.Get_size()
        self.line: Line = self.queue.line
        self.history: deque[Entry] = self.line.history

    @property
    def broken(self) -> MpicollError | None:
        """The error that later use raises (group destroyed, an operation failed, process forked); None: usable."""
        return self.line.broken

    @broken.setter
    def broken(self, error: MpicollError | None) -> None:
        self.line.broken = error

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: rank {self.rank} of {self.size}{', unusable' if self.broken else ''}>"

    def where(self, operation: str) -> str:
        """Returns the words by which errors name an operation of this group on this rank."""
        return f"{operation} on group {self.name!r} (rank {self.rank} of {self.size})"

    def check_usable(self, operation: str) -> None:
        """Raises the error in ``broken``, if there is one."""
        if self.broken is not None:
            error = type(self.broken)(f"{self.where(operation)}: {self.broken}")
            error.__dict__.update(self.broken.__dict__)  # ranks of a PeerLost
            raise error

    def under_way(self) -> UnderWay | None:
        """Returns the collective that this rank is in."""
        if not self.history or (last := self.history[-1])[0] <= self.line.ended:
            return None
        number, operation, since, _, asynchronous = last
        work = self.queue.work if asynchronous else None
        if asynchronous and work is None:  # it has just ended
            return None
        return UnderWay(operation, self, since, EVERYBODY, work, number)

    def fail(self, error: Exception) -> None:
        """Makes the group unusable: after an error inside MPI, or a timeout, ranks may be out of step."""
        if self.broken is None:
            failed = GroupFailed(f"the group is unusable since an operation failed: {error}")
            self.broken = error if isinstance(error, PeerLost) else failed
            if not isinstance(error, GroupFailed):  # the program has not aborted it
                self.failure = error
                self.call_abort_hooks()
            if isinstance(error, OperationTimeout):
                self.expired(str(error), False)

    def call_abort_hooks(self) -> None:
        """Calls the program's hooks, in the thread that has found that the group has failed, or that the job must end."""
        for hook in list(self.abort_hooks.values()):
            try:
                hook()
            except (Exception, SystemExit):  # noqa: BLE001  the failure itself matters more
                traceback.print_exc()
