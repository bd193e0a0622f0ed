"""Waits until the ranks that make a group together have all come, and names those that have not.

MPI's own calls that make a communicator wait for ever. So the ranks meet before them, without a store:

    the first rank   receives an empty message from each other rank, then sends each an empty message
    another rank     sends an empty message to the first rank, and receives one from it

Nothing else is sent if all ranks come. A rank that waits calls the roll, once after some seconds, and once at the time limit:

    [1] it asks every other rank                    [2] a rank that waits in the same call answers
    [3] ranks without an answer are missing:
        after some seconds, the lowest rank that waits names them on stderr; a rank that a lower one has asked asks nobody
        at the limit, it tells this to all ranks, and raises
                                                    [4] a rank that is told so raises too, also one that comes too late

A rank whose program has ended says so to all who wait for it (`turn_away`), and they raise at once. Of one that has destroyed its
world and lives on, the lowest rank that waits learns it from its board, or asks it (`inquiries.gone`), and tells the others.

So all ranks raise, and may try again together. Every attempt has a tag of its own; messages of earlier ones are never received.
"""

from __future__ import annotations

import pickle
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

from mpicoll._base import last_words
from mpicoll._base.torch_errors import OperationTimeout
from mpicoll._base.waits import ANSWER_S, LEAST_MEETING_S, NEXT_S, PATIENCE_AT_START_S, PATIENCE_S, SHORT_LOOK_S
from mpicoll._faults import time_limit
from mpicoll._faults.ledger import PROGRAM_ENDED
from mpicoll._mpi import arrivals, library, survivors
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.errors import not_made, peer_lost
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

FIRST_TAG = 16  # those below belong to other messages on the same communicator
ASK, HERE, MISSING, LEFT = "ask", "here", "missing", "left"
Gone = Callable[[Sequence[int]], "tuple[int, str] | None"]  # one of these ranks of the world that cannot come, and why


class _State:
    """What is remembered of a communicator."""

    def __init__(self) -> None:
        self.attempts: Counter[tuple[str, tuple[int, ...], str]] = Counter()  # how often its ranks have met
        self.called: set[int] = set()  # tags of attempts with a roll call: its messages may come when nobody waits any more
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
    roll_call = _RollCall(runtime, runtime.base, range(runtime.size), operation, limit_s)
    try:
        # Ranks come here tens of milliseconds apart: they load our modules first. A rank that yields instead of sleeping still
        # runs half of the time, on a core that a loading rank needs.
        roll_call.wait(lambda: _ended(runtime, [request]), PATIENCE_AT_START_S, Backoff(yield_s=0.0))
    except MPI.Exception:
        state.duplicate = None
        raise
    state.duplicate = None
    runtime.connect(comm)
    roll_call.look()  # the others may have given up before this rank came


def members(
    runtime: Runtime, ranks: Sequence[int], operation: str, limit_s: float, about: str = "", gone: Gone = lambda ranks: None
) -> None:
    """Returns once these ranks of the runtime have called this (collective over them). It must have its ``comm``.

    Only ranks with the same ``about`` meet. ``gone``: called again and again while ranks are missing.

    Raises:
        OperationTimeout: A rank has not come within the limit. Raised on all ranks, with its number.
        PeerLost, MPI.Exception: A rank has died.
    """
    if len(ranks) == 1:
        return
    comm, roll_call = runtime.comm, _RollCall(runtime, runtime.comm, ranks, operation, limit_s, about)
    roll_call.gone = gone
    first, tag, empty = ranks[0], roll_call.tag, [bytearray(1), 0, MPI.BYTE]
    leads = first == runtime.rank
    others = [rank for rank in ranks if rank != first]
    with runtime.lock:
        awaited = [comm.Irecv(empty, rank, tag) for rank in (others if leads else [first])]
        sent = [] if leads else [comm.Isend(empty, first, tag)]
    try:
        roll_call.wait(lambda: _ended(runtime, awaited), PATIENCE_S)
        roll_call.look()  # the others may have asked, or given up, before this rank came
        if leads:
            with runtime.lock:
                sent = [comm.Isend(empty, rank, tag) for rank in others]
    except OperationTimeout:
        with runtime.lock:
            for request in awaited:
                if request:
                    request.Cancel()
                    request.Wait()
        raise
    finally:
        with runtime.lock:
            arrivals.keep(sent)


def turn_away(comm: MPI.Intracomm) -> None:
    """Tells all ranks that wait for this one that its program has ended. Receives whatever has come on ``comm`` for meetings."""
    while (arrived := arrivals.first(comm, MPI.ANY_SOURCE, MPI.ANY_TAG)) is not None and arrived.tag >= FIRST_TAG:
        content = arrived.received(comm)
        met = (arrived.tag - FIRST_TAG) % 2 == 0  # the empty message of a meeting; otherwise one of its roll call
        if met or pickle.loads(content)[0] == ASK:
            arrivals.send(comm, (LEFT,), [arrived.source], arrived.tag + met)


class _RollCall:
    """The waiting of one rank for the other ranks of an attempt."""

    def __init__(
        self, runtime: Runtime, comm: MPI.Intracomm, ranks: Sequence[int], operation: str, limit_s: float, about: str = ""
    ) -> None:
        self.gone: Gone = lambda ranks: None
        self._runtime, self._comm, self._operation, self._limit_s = runtime, comm, operation, limit_s
        self._others = [rank for rank in ranks if rank != runtime.rank]
        attempts, key = _state(comm).attempts, (operation, tuple(ranks), about)
        attempts[key] += 1
        number = zlib.crc32(repr((key, attempts[key])).encode())
        self.tag = FIRST_TAG + 2 * (number % ((runtime.tag_ub - FIRST_TAG) // 2))  # the next one is that of the roll call
        self._present: set[int] = set()

    @time_limit.suspended()
    def wait(self, done: Callable[[], bool], patience_s: float, backoff: Backoff | None = None) -> None:
        """Returns once ``done`` is true. ``patience_s``: until the missing are named. ``backoff``: None: the default.

        Raises:
            OperationTimeout: The limit has passed here or on another rank.
        """
        backoff = backoff or Backoff()
        begun = looked = time.monotonic()
        calls, named = begun + patience_s + NEXT_S * sum(rank < self._runtime.rank for rank in self._others), False
        while not done():
            now = time.monotonic()
            if now - begun > max(self._limit_s, LEAST_MEETING_S):
                if self._answered(done):
                    return
                self._give_up(self._missing())
            if now - looked > SHORT_LOOK_S:
                looked = now
                self.look()
            if now > calls and self._is_lowest():
                gone = self.gone(self._missing())  # before the roll: answers of other nodes take longer
                if not named and self._answered(done):
                    return
                if gone is not None:
                    self._give_up([gone[0]], gone[1])
                if not named:
                    self._name_missing(now - begun)
                calls, named = time.monotonic() + ANSWER_S, True
            backoff.pause()

    def _answered(self, done: Callable[[], bool]) -> bool:
        """Calls the roll: asks all other ranks, and receives their answers. Returns whether ``done`` has become true."""
        self._keep_for_finalize()
        self._send(self._others, ASK)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self.look()
            if done():
                return True
            time.sleep(1e-3)
        return False

    def _missing(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._present]

    def _is_lowest(self) -> bool:
        """Whether no lower rank is known to wait, too."""
        return self._runtime.rank < min(self._present, default=self._runtime.size)

    def _name_missing(self, waited_s: float) -> None:
        missing = self._missing()
        if missing and self._is_lowest():
            who = f"Rank {missing[0]} has" if len(missing) == 1 else f"Ranks {', '.join(map(str, missing))} have"
            print(f"mpicoll: {self._where()} has waited for {waited_s:.0f} s. {who} not come", file=sys.stderr, flush=True)

    def look(self) -> None:
        """Receives what other ranks have sent, and answers. Raises OperationTimeout if one has given up or ended, or PeerLost."""
        asked, received = [], list[tuple[int, Any]]()
        with self._runtime.lock, survivors.Tolerated():
            dead = survivors.failed(self._comm) if survivors.possible() else ()
            if any(rank in self._others for rank in dead) or (dead and self._runtime.base.Is_revoked()):
                raise peer_lost(self._where(), dead)
            if dead:
                self._comm.Ack_failed(len(dead))  # messages from any rank can be received again, if it lives
            received.extend(arrivals.objects(self._comm, self.tag + 1))
        for source, (kind, *rest) in received:
            self._present.add(source)
            if kind == LEFT:
                self._give_up([source], PROGRAM_ENDED)
            if kind == MISSING:
                raise self._error(*rest)
            if kind == ASK:
                asked.append(source)
        self._send(asked, HERE)

    def _send(self, ranks: Sequence[int], *message: Any) -> None:
        with self._runtime.lock:
            arrivals.send(self._comm, message, ranks, self.tag + 1)

    def _where(self) -> str:
        return f"{self._operation} (rank {self._runtime.rank} of {self._runtime.size})"

    def _give_up(self, missing: Sequence[int], reason: str = "") -> NoReturn:
        """Raises on all ranks that wait. ``reason``: why the missing cannot come; empty: the limit has passed."""
        error = self._error(missing, reason, self._limit_s)
        self._send(self._others, MISSING, missing, reason, self._limit_s)
        raise error

    def _error(self, missing: Sequence[int], reason: str, limit_s: float) -> OperationTimeout:
        self._keep_for_finalize()
        if reason:
            text = last_words.about(missing[0], f"rank {', '.join(map(str, missing))} cannot come: {reason}")
        elif missing:
            text = f"Timed out: {last_words.late(missing, limit_s)}"
        else:
            text = f"Timed out: no end within the timeout of {limit_s:g} s, although all ranks have come"
        return OperationTimeout(f"{self._where()}: {text}")

    def _keep_for_finalize(self) -> None:
        _drain_at_finalize()
        _state(self._comm).called.add(self.tag)


def _ended(runtime: Runtime, requests: list[MPI.Request]) -> bool:
    with runtime.lock:
        return bool(MPI.Request.Testall(requests))


def _state(comm: MPI.Intracomm) -> _State:
    """The state of a communicator. MPI frees it with the communicator, whose handle it may give to another one."""
    state = comm.Get_attr(_keyval())
    if not isinstance(state, _State):
        state = _State()
        comm.Set_attr(_keyval(), state)
    return state


@cache
def _drain_at_finalize() -> None:
    """MPICH's MPI_Finalize fails if messages on MPI_COMM_WORLD have not been received."""
    called = _state(MPI.COMM_WORLD).called

    def drain() -> None:
        for tag in called:
            list(arrivals.objects(MPI.COMM_WORLD, tag + 1))

    library.before_finalize(drain)


@cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()
