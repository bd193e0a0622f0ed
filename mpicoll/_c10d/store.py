"""torch's store over MPI: rank 0 has the keys, and answers the other ranks. No port is opened, and no name is looked up.

    rank 0          HashStore of torch ◄── a thread that answers; the asking rank rings it (_mpi/bell.py), if it is on this node
    every rank      MessageStore: for each call a question to rank 0 (_faults/questions.py), and its answer. Rank 0 answers itself

A question is about (number of the world, name of the method, its arguments, limit in seconds).

A job that uses mpi alone makes such a store and asks it nothing. A group of Gloo that joins later meets there. Rank 0 answers at
its end, too, from `program_end.leave`. torch lets no class in Python have queues and list_keys: NotImplementedError.

# Note [Where the store is torch's]
# Three kinds of world meet at a TCPStore (rendezvous.py). A mixture with another backend, and a world in which a rank has a kind
# of device for which another backend may join: a thread of NCCL on each rank asks the store every second, until the process ends,
# and a store in Python ends a process in which a thread of C++ asks it then. And a job that goes on when ranks die.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import DistStoreError

from mpicoll._base import processes, torch_variables
from mpicoll._base.waits import AFTER_LIMIT_S
from mpicoll._device import consensus as devices
from mpicoll._engine.registry import registry
from mpicoll._faults import questions
from mpicoll._faults.questions import KEYS, Answer, Question
from mpicoll._mpi import bell, library, runtime, survivors
from mpicoll._mpi.backoff import Backoff, Naps
from mpicoll._mpi.channel import check_levels
from mpicoll._mpi.runtime import Runtime

NAPS = Naps(50e-6, 0.25, 0.05)  # of the thread that answers; 0.1 % of a core when nobody asks
LEAST_SPEED = 100e6  # bytes/s of a large value
GONE = "the process group of this store has been destroyed"


class Keys:
    """Rank 0's keys, and the thread that answers the other ranks, also when rank 0 has destroyed the world."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.mpi: Runtime | None = None  # of the world that is open, or was the last one
        self._world, self._closed = 0, False
        self._open: list[tuple[int, Question, float]] = []  # rank, question, until when it waits for its keys
        self._absent = os.urandom(16).hex()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, mpi: Runtime, world: int) -> None:
        """Starts with no keys."""
        self.stop()
        self.store, self.mpi, self._world, self._closed = HashStore(), mpi, world, False
        self._ended.clear()
        self._thread = threading.Thread(target=self._loop, name="mpicoll store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tells ranks that wait that the world is gone. The thread goes on, and tells it to ranks that ask later.

        It ends where it would use MPI beside the program, or a freed communicator. Ranks then hear it from the next world.
        """
        self._closed = True
        freed = self.mpi is not None and self.mpi.comm != runtime.world_comm()
        if self.mpi is not None and (freed or self.mpi.serialized):
            self.stop()
            self.look()
        self.mpi = None if freed else self.mpi

    def stop(self) -> None:
        """Ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._ended.set()
            bell.services.wake_own()
            thread.join()

    def forget(self) -> None:
        """Resets the state in a forked child, which does not have the parent's thread."""
        self._thread = self.mpi = None

    def _loop(self) -> None:
        backoff = Backoff(spin_s=0.0, yield_s=0.0, naps=NAPS, serves=True)
        while not self._ended.is_set():
            runtime.entering()
            if self.look():
                backoff.reset()
            backoff.pause()

    def look(self) -> bool:
        """Answers the questions that can be answered. Returns whether one has come or has been answered."""
        if (mpi := self.mpi) is None or runtime.finalized():
            return False
        before, now = len(self._open), time.monotonic()
        questions.serve(KEYS, lambda rank, question: self._open.append((rank, question, now + question.about[-1])), mpi)
        answers = [(each, self.answer(each[1], each[2] <= now)) for each in self._open]
        self._open = [each for each, answer in answers if answer is None]
        for (rank, *_), answer in answers:
            if answer is not None:
                questions.answer(rank, answer, mpi)
                bell.services.wake(rank)
        if moved := len(answers) > before or len(self._open) < before:
            bell.services.wake(0)  # the program of rank 0 may wait for a key, too
        return moved

    def answer(self, question: Question, is_late: bool) -> Answer | None:
        """What the method returns, or its error; None: a key is not there yet, and the question not ``is_late``."""
        world, name, arguments, limit_s = question.about
        gone = question.answered(DistStoreError(f"{name}: rank 0 has destroyed the process group of this store"))
        if world != self._world:
            return gone
        try:
            if name not in ("get", "multi_get", "wait"):
                return question.answered(getattr(self.store, name)(*arguments))
            keys = [arguments[0]] if name == "get" else arguments[0]
            # Changes nothing, and gives `_absent` where rank 0 has deleted a key since. HashStore's own get would wait then.
            there = self.store.check(keys)
            values = [self.store.compare_set(key, self._absent, self._absent) if there else self._absent.encode() for key in keys]
        except Exception as error:  # noqa: BLE001  raised on the rank that asks
            return question.answered(error)
        if self._absent.encode() not in values:
            return question.answered(values[0] if name == "get" else values if name == "multi_get" else None)
        if self._closed or not is_late:
            return gone if self._closed else None
        missing = next((key for key in keys if not self.store.check([key])), keys[-1])
        return question.answered(DistStoreError(f"{name}: rank 0 has no key {missing!r} after {limit_s:g} s"))


def _asks(name: str) -> Any:
    return lambda self, *arguments: self._ask(name, *arguments)


class MessageStore(Store):
    """The store of a rank. C++ calls the methods by the names that they have here, with values as bytes.

    Any number of threads may ask at once.

    Attributes:
        made: All stores of this rank. C++ may keep a store whose half in Python nobody else keeps.
    """

    made: ClassVar[list[MessageStore]] = []
    _numbers = itertools.count(1)
    _receiving = threading.Lock()  # guards _come
    _come: ClassVar[dict[int, Answer]] = {}  # by the number of the question, until its thread takes it

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

    def _ask(self, name: str, *arguments: Any, limit: timedelta | None = None) -> Any:
        """Asks rank 0. ``limit``: None: the timeout of the store. Zero: as with torch's stores there is none."""
        limit_s = (self.timeout if limit is None else limit).total_seconds() or math.inf  # type: ignore[attr-defined]
        if runtime.in_forked_child():
            raise runtime.forked_error()
        question = Question(KEYS, (self._world, name, arguments, limit_s), next(self._numbers))
        late, nbytes = time.monotonic() + limit_s, 0
        self._check_open(name)
        if self._mpi.rank != 0:
            nbytes = questions.ask([0], question, self._mpi)
            bell.services.wake(0)
        backoff = Backoff(serves=True, yield_s=Backoff.YIELD_S + nbytes / LEAST_SPEED)  # it moves while this rank calls MPI
        while (answer := self._answer(question, late)) is None:
            if time.monotonic() > late + AFTER_LIMIT_S:
                raise DistStoreError(f"{name}: rank 0 has not answered for {limit_s:g} s")
            backoff.pause()
        if self._mpi.rank == 0:
            bell.services.wake(0)  # the thread that answers: others may wait for this key
        if isinstance(answer.value, Exception):
            raise answer.value
        return answer.value

    def _answer(self, question: Question, late: float) -> Answer | None:
        """The answer of rank 0, if it is there."""
        with self._receiving:
            self._check_open(question.about[1])
            if self._mpi.rank == 0:
                return _keys.answer(question, late <= time.monotonic())
            # One that an exception has left is never taken.
            self._come.update((answer.number, answer) for _, answer in questions.answers(KEYS, self._mpi))
            return self._come.pop(question.number, None)

    def _check_open(self, operation: str) -> None:
        if self._mpi is not runtime.current() or runtime.finalized():
            raise DistStoreError(f"{operation}: {GONE}")


_worlds = itertools.count(1)  # on rank 0
_keys = Keys()  # used on rank 0
close, stop = _keys.close, _keys.stop
os.register_at_fork(after_in_child=_keys.forget)


def make(mpi: Runtime, timeout_s: float) -> Store | None:
    """Makes the store of a world (collective). None: it needs torch's, see Note [Where the store is torch's].

    Sets MASTER_ADDR and MASTER_PORT if they are unset, for programs that open a store of their own: to the host of rank 0 and a
    port that was free there.

    Raises:
        ThreadLevelError: On all ranks, if MPI has different thread levels on them and cannot work so.
    """
    if survivors.possible() or mpi.own:
        return None
    own = mpi.thread_level, devices.seen(), processes.network()
    said = mpi.comm.allgather((*own, (processes.free_port(), next(_worlds)) if mpi.rank == 0 else ()))
    mpi.thread_levels = tuple(level for level, *_ in said)
    check_levels(mpi.thread_levels)
    if any(sees_devices for _, sees_devices, *_ in said):
        return None
    _, _, (first_host, *_), (port, world) = said[0]
    one_host = len({network for _, _, network, _ in said}) == 1
    torch_variables.provide_meeting("127.0.0.1" if one_host else first_host, port)
    if mpi.rank == 0 and mpi.size > 1:
        _keys.open(mpi, world)
    made: Store = HashStore() if mpi.size == 1 else MessageStore(mpi, world)
    made.set_timeout(timedelta(seconds=timeout_s))
    _look_at_the_end()
    return made


@cache
def _look_at_the_end() -> None:
    """Rank 0 answers until all ranks have come to `program_end.leave`, where no other thread runs."""

    def look() -> None:
        _keys.look()
        if (mpi := runtime.current()) is not None and mpi.connected:
            questions.answers(KEYS, mpi)  # to questions that an exception has left

    registry.looks.append(look)
    library.before_finalize(stop)
