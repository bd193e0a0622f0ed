"""torch's store over MPI: rank 0 has the keys, and answers the other ranks. No port is opened, and no name is looked up.

    rank 0          HashStore of torch ◄── a thread that answers; it looks 4 times a second, and more often once it is asked
    another rank    MessageStore: for each call a question to rank 0, and its answer

A job that uses mpi alone makes such a store and asks it nothing. A group of Gloo that joins later meets there.

# Note [Where the store is torch's]
# A mixture with another backend meets at a TCPStore (rendezvous.py): a thread of NCCL on each rank asks the store every second,
# until the process ends, when a store in Python answers no more. So do a world of a communicator of the user and a job that goes
# on when ranks die.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import secrets
import socket
import threading
import time
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar, NamedTuple

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import DistStoreError

from mpicoll._base.waits import AFTER_LIMIT_S
from mpicoll._engine.registry import registry
from mpicoll._mpi import arrivals, library, runtime, survivors
from mpicoll._mpi.backoff import Backoff, Naps
from mpicoll._mpi.channel import check_levels
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

QUESTION, ANSWER = 3, 4  # tags on the runtime's own communicator; exit_handshake.py has 1 and 2
NAPS = Naps(50e-6, 0.25, 0.05, idle_after_s=5.0, idle_s=0.25)  # of the thread that answers; 0.1 % of a core when nobody asks


class Question(NamedTuple):
    """``world``: the number of the asking rank's world. ``number``: of the question, on that rank. ``call``: of a method."""

    world: int
    number: int
    call: tuple[Any, ...]
    limit_s: float


class Answer(NamedTuple):
    """The answer to the question of this number: what the method has returned, or the error that it has raised."""

    number: int
    value: Any = None
    error: Exception | None = None


class Asked(NamedTuple):
    """A question of a rank, until when it waits for its keys, and the values of those that have been there, in order."""

    rank: int
    question: Question
    deadline: float
    values: list[bytes]


class Keys:
    """Rank 0's keys, and the thread that answers the other ranks while a world is open."""

    def __init__(self) -> None:
        self.store = HashStore()
        self._world = 0  # none
        self._open: list[Asked] = []
        self._absent = secrets.token_hex()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, mpi: Runtime, world: int) -> HashStore:
        """Starts with no keys. Returns the store of rank 0."""
        self.store, self._world = HashStore(), world
        self._ended.clear()
        self._thread = threading.Thread(target=self._loop, args=(mpi,), name="mpicoll store", daemon=True)
        self._thread.start()
        return self.store

    def close(self) -> None:
        """Forgets the world. Whoever asks for it is told so at the end of the program at the latest."""
        self._world = 0
        self.stop()

    def stop(self) -> None:
        """Ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            thread.join()

    def _loop(self, mpi: Runtime) -> None:
        since = time.monotonic()
        while not self._ended.wait(NAPS.after(time.monotonic() - since)):
            runtime.entering()
            if self.look(mpi):
                since = time.monotonic()

    def look(self, mpi: Runtime) -> bool:
        """Answers the questions that can be answered. Returns whether one has come or has been answered."""
        now, comm = time.monotonic(), mpi.comm
        with mpi.lock:
            came = [(rank, Question(*content)) for rank, content in arrivals.objects(comm, QUESTION)]
        self._open += [Asked(rank, question, now + question.limit_s, []) for rank, question in came]
        answers = [(asked, self._answer(asked, asked.deadline <= now)) for asked in self._open]
        self._open = [asked for asked, answer in answers if answer is None]
        with mpi.lock:
            for asked, answer in answers:
                if answer is not None:
                    arrivals.send(comm, tuple(answer), [asked.rank], ANSWER)
        return bool(came) or len(self._open) < len(answers)

    def _answer(self, asked: Asked, is_late: bool) -> Answer | None:
        """The answer; None: a key is not there yet, and the question not ``is_late``."""
        question, values = asked.question, asked.values
        number, (name, *words) = question.number, question.call
        if question.world != self._world:
            return Answer(number, error=DistStoreError("rank 0 has destroyed the process group of this store"))
        try:
            if name not in ("get", "multi_get", "wait"):
                return Answer(number, getattr(self.store, name)(*words))
            for key in ([words[0]] if name == "get" else words[0])[len(values) :]:
                # The value, or `_absent`; it changes nothing. HashStore's own get would wait here for a key that is not there.
                value: bytes = self.store.compare_set(key, self._absent, self._absent)
                if value == self._absent.encode():
                    late = f"{name}: rank 0 has no key {key!r} after {question.limit_s:g} s"
                    return Answer(number, error=DistStoreError(late)) if is_late else None
                values.append(value)
        except Exception as error:  # noqa: BLE001  raised on the rank that asks
            return Answer(number, error=error)
        return Answer(number, values[0] if name == "get" else values if name == "multi_get" else None)


def _asks(name: str) -> Any:
    return lambda self, *words: self._ask(name, *words)


class MessageStore(Store):
    """The store of a rank other than 0. C++ calls the methods by the names that they have here, with values as bytes.

    As with TCPStore, a rank asks one question at a time: a thread that waits for a key keeps the others of its rank waiting.

    Attributes:
        made: All stores of this rank. C++ may keep a store whose half in Python nobody else keeps.
    """

    _asking = threading.Lock()
    _numbers = itertools.count(1)
    made: ClassVar[list[MessageStore]] = []

    def __init__(self, mpi: Runtime, world: int) -> None:
        super().__init__()
        self._mpi, self._world = mpi, world
        self.made.append(self)

    set, get, add, append = _asks("set"), _asks("get"), _asks("add"), _asks("append")
    check, compare_set, multi_get, multi_set = _asks("check"), _asks("compare_set"), _asks("multi_get"), _asks("multi_set")
    getNumKeys, deleteKey = _asks("num_keys"), _asks("delete_key")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, limit=timeout)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Store:
        return self

    def _ask(self, *call: Any, limit: timedelta | None = None) -> Any:
        """Asks rank 0. ``limit``: None: the timeout of the store. Zero: as with torch's stores there is none."""
        limit_s = (self.timeout if limit is None else limit).total_seconds() or math.inf  # type: ignore[attr-defined]
        if runtime.in_forked_child():
            raise runtime.forked_error()
        if runtime.finalized():
            raise DistStoreError(f"{call[0]}: MPI has been finalised, and the store with it")
        with self._asking:
            number, backoff = next(self._numbers), Backoff.patient()
            deadline = time.monotonic() + limit_s + AFTER_LIMIT_S
            with self._mpi.lock:
                arrivals.send(self._mpi.comm, tuple(Question(self._world, number, call, limit_s)), [0], QUESTION)
            while time.monotonic() < deadline:
                with self._mpi.lock:
                    answers = [Answer(*content) for _, content in arrivals.objects(self._mpi.comm, ANSWER)]
                for answer in answers:  # some are for questions that an exception has left
                    if answer.number == number:
                        if answer.error is not None:
                            raise answer.error
                        return answer.value
                backoff.pause()
        raise DistStoreError(f"{call[0]}: rank 0 has not answered for {limit_s:g} s")


_worlds = itertools.count(1)  # alike on all ranks
_keys = Keys()  # used on rank 0


def possible(mpi: Runtime) -> bool:
    """Whether this world can have such a store; see Note [Where the store is torch's]."""
    return mpi.base == MPI.COMM_WORLD and not survivors.possible()


def make(mpi: Runtime) -> Store:
    """Makes the store of a world of all ranks, of which none is open (collective).

    Sets MASTER_ADDR and MASTER_PORT if they are unset, for programs that open a store of their own: to the host of rank 0 and a
    port that was free there.

    Raises:
        ThreadLevelError: On all ranks, if MPI has different thread levels on them and cannot work so.
    """
    said = mpi.comm.allgather((mpi.thread_level, mpi.hostname, _free_port() if mpi.rank == 0 else 0))
    mpi.thread_levels = tuple(level for level, *_ in said)
    check_levels(mpi.thread_levels)
    one_host = len({host for _, host, _ in said}) == 1
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1" if one_host else said[0][1])
    os.environ.setdefault("MASTER_PORT", str(said[0][2]))
    world = next(_worlds)
    if mpi.size == 1:
        return HashStore()
    _look_at_the_end(mpi)
    return MessageStore(mpi, world) if mpi.rank else _keys.open(mpi, world)


def close() -> None:
    """Ends the store of the world that is given up, on rank 0; elsewhere nothing."""
    _keys.close()


@cache
def _look_at_the_end(mpi: Runtime) -> None:
    """Rank 0 answers until all ranks have come to `exit_handshake.leave`. Threads end before, with the functions of atexit."""

    def look() -> None:
        if mpi.rank == 0:
            _keys.look(mpi)
        else:
            with mpi.lock:
                list(arrivals.objects(mpi.comm, ANSWER))  # to questions that an exception has left

    atexit.register(_keys.stop)
    registry.looks.append(look)
    library.before_finalize(_keys.stop)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
