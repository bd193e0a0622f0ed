"""Ranks meet: they wait until all have come, and name those that have not.

A rank waits in MPI for ever if another does not come to make a communicator, or to a collective. So ranks meet first:

    the first rank   receives a value from each other rank, then sends each what it finds in the values
    another rank     sends its value to the first rank, and receives that

Nothing else is sent if all ranks come. A rank that waits calls the roll, once after some seconds, and once at the time limit:

    [1] it asks every other rank                    [2] a rank that waits in the same call answers
    [3] ranks without an answer are missing:
        after some seconds, the lowest rank that waits names them on stderr; a rank that a lower one has asked asks nobody
        at the limit, it tells this to all ranks, and raises
                                                    [4] a rank that is told so raises too, also one that comes too late

A rank whose program has ended says so to all who wait for it (`turn_away`), and they raise at once. Of one that has destroyed its
world and lives on, the lowest rank that waits learns it from its board, or asks it (`inquiries.gone`), and tells the others.

So all ranks raise, and may try again together. Every attempt to make a group has a tag of its own; messages of earlier ones are
never received. A group that exists has one tag for its meetings: the first one that fails is the last one.
"""

from __future__ import annotations

import math
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from mpicoll._base import last_words, log
from mpicoll._base.group_errors import OperationTimeout
from mpicoll._base.waits import ANSWER_OF_FIRST_S, ANSWER_S, AT_END_S, LEAST_MEETING_S, NEXT_S, PATIENCE_AT_START_S, PATIENCE_S
from mpicoll._faults.call_comparison import PROGRAM_ENDED
from mpicoll._faults.group_state import GroupState
from mpicoll._faults.watch import suspended
from mpicoll._mpi import arrivals, library, survivors
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.errors import not_made, peer_lost
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

TAG = 5  # on the communicator of a group; questions have 1 to 4
FIRST_TAG = 16  # on the communicator of a runtime
COME, FOUND, ASK, HERE, MISSING, LEFT = "come", "found", "ask", "here", "missing", "left"
Gone = Callable[[Sequence[int]], "tuple[int, str] | None"]  # one of these ranks of the world that cannot come, and why


class _State:
    """What is remembered of a communicator."""

    def __init__(self) -> None:
        self.attempts: Counter[tuple[str, tuple[int, ...], str]] = Counter()  # how often its ranks have met
        self.duplicate: tuple[MPI.Intracomm, MPI.Request] | None = None  # of it, that is being made


def everyone(runtime: Runtime, operation: str, limit_s: float) -> None:
    """Returns once all ranks of the runtime have called this; afterwards it has its ``comm`` (collective).

    Raises:
        OperationTimeout: A rank has not come within the limit. Raised on all ranks, with its number.
        CommunicationError: MPI has no communicator left.
    """
    if runtime.size == 1 or survivors.possible():  # there MPI fails when a rank dies, and survivors.py waits for the others
        return
    if not runtime.connected:
        try:
            _connect(runtime, operation, limit_s)
        except MPI.Exception as raw:
            raise not_made(raw, operation) from raw
    members(runtime, range(runtime.size), operation, limit_s)


def _connect(runtime: Runtime, operation: str, limit_s: float) -> None:
    """The first meeting of all ranks of the runtime: makes its ``comm``.

    Messages on the communicator of the user could match receives of the user, which those of a duplication do not.
    """
    state = _state(runtime.base)
    with runtime.lock:
        state.duplicate = state.duplicate or runtime.base.Idup()
    comm, request = state.duplicate
    meeting = _attempt(runtime, runtime.base, range(runtime.size), operation, limit_s)
    try:
        # Ranks come here tens of milliseconds apart: they load our modules first. A rank that yields instead of sleeping still
        # runs half of the time, on a core that a loading rank needs.
        meeting.wait(lambda: _ended(runtime, request), PATIENCE_AT_START_S, Backoff(yield_s=0.0))
    except MPI.Exception:
        state.duplicate = None
        raise
    state.duplicate = None
    runtime.connect(comm)
    meeting.look()  # the others may have given up before this rank came


def members(
    runtime: Runtime, ranks: Sequence[int], operation: str, limit_s: float, about: str = "", gone: Gone = lambda ranks: None
) -> None:
    """Returns once these ranks of the runtime have called this (collective over them). It must have its ``comm``.

    Only ranks with the same ``about`` meet. ``gone``: called again and again while ranks are missing.

    Raises:
        OperationTimeout: A rank has not come within the limit. Raised on all ranks, with its number.
        PeerLost, MPI.Exception: A rank has died.
    """
    if len(ranks) > 1:
        meeting = _attempt(runtime, runtime.comm, ranks, operation, limit_s, about)
        meeting.gone = gone
        meeting.meet(patience_s=PATIENCE_S)


def of_group(
    group: GroupState,
    operation: str,
    value: Any,
    limit_s: float,
    judge: Callable[[dict[int, Any]], Any] = bool,
    all_named: bool = True,
) -> Any:
    """Returns on all ranks what ``judge`` finds in the ranks' values, on rank 0 (collective).

    Raises:
        OperationTimeout: A rank did not come. Raised on every rank that came; names all global ranks that did not, or the first.
            The group is unusable afterwards.
    """
    meeting = _Meeting(
        group.channel.runtime, group.channel.comm, range(group.size), TAG, group.where(operation), limit_s,
        late_s=(ANSWER_OF_FIRST_S - ANSWER_S) * (group.rank > 0), numbers=group.global_ranks, all_named=all_named,
    )  # fmt: skip
    try:
        return meeting.meet(value, judge)  # the watchdog says who is late
    except OperationTimeout as error:
        group.fail(error)
        raise


def at_end(comm: MPI.Intracomm, answer: Callable[[], object], named: Callable[[Sequence[int]], str]) -> None:
    """Returns once all ranks of the communicator have called this (collective), however late.

    ``answer``: called again and again until then. ``named``: returns what is said of missing ranks, after "rank 0 of 2".
    """
    runtime, barrier = Runtime(comm, own=True), comm.Ibarrier()
    meeting = _Meeting(runtime, comm, range(runtime.size), TAG, f"rank {runtime.rank} of {runtime.size}", math.inf)
    meeting.said = lambda missing, waited_s: named(missing)

    def ended() -> bool:
        answer()
        turn_away(comm)
        return barrier.Test()

    meeting.wait(ended, AT_END_S - ANSWER_S)


def turn_away(comm: MPI.Intracomm) -> None:
    """Tells all ranks that wait for this one that its program has ended. Receives whatever has come on ``comm`` for meetings."""
    while (arrived := arrivals.first(comm, MPI.ANY_SOURCE, MPI.ANY_TAG)) is not None and arrived.tag >= FIRST_TAG:
        if pickle.loads(arrived.received(comm))[0] in (COME, ASK):
            arrivals.send(comm, (LEFT,), [arrived.source], arrived.tag)


def _attempt(
    runtime: Runtime, comm: MPI.Intracomm, ranks: Sequence[int], operation: str, limit_s: float, about: str = ""
) -> _Meeting:
    """The next attempt of these ranks to meet. Shorter limits count as one of `LEAST_MEETING_S`."""
    attempts, key = _state(comm).attempts, (operation, tuple(ranks), about)
    attempts[key] += 1
    tag = FIRST_TAG + zlib.crc32(repr((key, attempts[key])).encode()) % (runtime.tag_ub - FIRST_TAG)
    where = f"{operation} (rank {runtime.rank} of {runtime.size})"
    return _Meeting(runtime, comm, ranks, tag, where, limit_s, late_s=max(0.0, LEAST_MEETING_S - limit_s))


def _late(missing: Sequence[int], waited_s: float) -> str:
    who = f"Rank {missing[0]} has" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))} have"
    return f"has waited for {waited_s:.0f} s. {who} not come"


@dataclass(eq=False)
class _Meeting:
    """The waiting of one rank for the other ranks of an attempt.

    Attributes:
        ranks: Of ``comm``, those that meet.
        late_s: Seconds after the limit until this rank gives up.
        numbers: In the world, by rank of ``comm``; empty: the same.
        all_named: Whether an error names all missing ranks, not only the first one.
    """

    runtime: Runtime
    comm: MPI.Intracomm
    ranks: Sequence[int]
    tag: int
    where: str
    limit_s: float
    late_s: float = 0.0
    numbers: Sequence[int] = ()
    all_named: bool = True
    gone: Gone = lambda ranks: None
    said: Callable[[Sequence[int], float], str] = _late

    def __post_init__(self) -> None:
        self.rank, self.first = self.comm.Get_rank(), self.ranks[0]
        self.others = [rank for rank in self.ranks if rank != self.rank]
        self.present: set[int] = set()
        self.values: dict[int, Any] = {}  # on the first rank
        self.found: list[Any] = []  # what the first rank has found in them

    def meet(self, value: Any = None, judge: Callable[[dict[int, Any]], Any] = bool, patience_s: float = math.inf) -> Any:
        """Returns on all ranks what ``judge`` finds in the ranks' values, on the first rank."""
        if self.rank == self.first:
            self.values[self.rank] = value
            self.wait(lambda: len(self.values) > len(self.others), patience_s)
            self.found = [judge(self.values)]
            self._send(self.others, FOUND, *self.found)
        else:
            self._send([self.first], COME, value)
            self.wait(lambda: bool(self.found), patience_s)
        return self.found[0]

    @suspended()
    def wait(self, done: Callable[[], bool], patience_s: float, backoff: Backoff | None = None) -> None:
        """Returns once ``done`` is true. ``patience_s``: until the missing are named. ``backoff``: None: the default.

        Raises:
            OperationTimeout: The limit has passed here or on another rank.
        """
        backoff, begun, named = backoff or Backoff(), time.monotonic(), False
        calls = begun + patience_s + NEXT_S * sum(rank < self.rank for rank in self.others)
        while True:
            self.look()
            if done():
                return
            now = time.monotonic()
            if now - begun > self.limit_s + self.late_s:
                if not self.values and self._answered(done):  # otherwise it knows without asking
                    return
                self._give_up(self._missing())
            if now > calls and self._is_lowest():
                gone = self.gone(self._missing())  # before the roll: answers of other nodes take longer
                if not named and self._answered(done):
                    return
                if gone is not None:
                    self._give_up([gone[0]], gone[1])
                if not named and self._missing() and self._is_lowest():
                    log.say(f"{self.where} {self.said(self._missing(), now - begun)}")
                calls, named = time.monotonic() + ANSWER_S, True
            backoff.pause()

    def _answered(self, done: Callable[[], bool]) -> bool:
        """Calls the roll: asks all other ranks, and receives their answers. Returns whether ``done`` has become true."""
        self._expect_more()
        self._send(self.others, ASK)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self.look()
            if done():
                return True
            time.sleep(1e-3)
        return False

    def _missing(self) -> list[int]:
        return [rank for rank in self.others if rank not in self.present]

    def _numbers(self, ranks: Sequence[int]) -> list[int]:
        return [self.numbers[rank] if self.numbers else rank for rank in ranks]

    def _is_lowest(self) -> bool:
        """Whether no lower rank is known to wait, too."""
        return self.rank < min(self.present, default=self.runtime.size)

    def look(self) -> None:
        """Receives what other ranks have sent, and answers.

        Raises:
            OperationTimeout: One of them has given up, or has ended.
            PeerLost, MPI.Exception: One of them has died.
        """
        asked, received, revoked = [], list[tuple[int, Any]](), False
        with self.runtime.lock, survivors.Tolerated():
            dead = survivors.failed(self.comm) if survivors.possible() else ()
            if any(rank in self.others for rank in dead) or (dead and self.runtime.base.Is_revoked()):
                raise peer_lost(self.where, tuple(self._numbers(dead)))
            if dead:
                self.comm.Ack_failed(len(dead))  # messages from any rank can be received again, if it lives
            revoked = survivors.possible() and self.comm.Is_revoked()
            received.extend(arrivals.objects(self.comm, self.tag))
        if revoked:
            raise MPI.Exception(MPI.ERR_PROC_FAILED)
        for source, (kind, *rest) in received:
            self.present.add(source)
            if kind == COME:
                self.values[source] = rest[0]
            if kind == FOUND:
                self.found = rest
            if kind == LEFT:
                self._give_up([source], PROGRAM_ENDED)
            if kind == MISSING:
                raise self._error(*rest)
            if kind == ASK:
                asked.append(source)
        if asked:
            self._send(asked, HERE)

    def _send(self, ranks: Sequence[int], *message: Any) -> None:
        with self.runtime.lock:
            arrivals.send(self.comm, message, ranks, self.tag)

    def _give_up(self, missing: Sequence[int], reason: str = "") -> NoReturn:
        """Raises on all ranks that wait. ``reason``: why the missing cannot come; empty: the limit has passed."""
        error = self._error(missing, reason, self.limit_s)
        self._send(self.others, MISSING, missing, reason, self.limit_s)
        raise error

    def _error(self, missing: Sequence[int], reason: str, limit_s: float) -> OperationTimeout:
        self._expect_more()
        ranks = self._numbers(missing if self.all_named else missing[:1])
        if reason:
            text = last_words.about(ranks[0], f"rank {', '.join(map(str, ranks))} cannot come: {reason}")
        elif ranks:
            text = f"Timed out: {last_words.late(ranks, limit_s)}"
        else:
            text = f"Timed out: no end within the timeout of {limit_s:g} s, although all ranks have come"
        return OperationTimeout(f"{self.where}: {text}")

    def _expect_more(self) -> None:
        """Messages of a roll call may come when nobody waits any more."""
        if self.comm == MPI.COMM_WORLD:
            _called().add(self.tag)


def _ended(runtime: Runtime, request: MPI.Request) -> bool:
    with runtime.lock:
        return bool(request.Test())


def _state(comm: MPI.Intracomm) -> _State:
    """The state of a communicator. MPI frees it with the communicator, whose handle it may give to another one."""
    state = comm.Get_attr(_keyval())
    if not isinstance(state, _State):
        state = _State()
        comm.Set_attr(_keyval(), state)
    return state


@cache
def _called() -> set[int]:
    """Tags on MPI_COMM_WORLD, for which MPICH's MPI_Finalize fails if messages have not been received."""
    tags = set[int]()

    def drain() -> None:
        for tag in tags:
            list(arrivals.objects(MPI.COMM_WORLD, tag))

    library.before_finalize(drain)
    return tags


@cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()
