"""Collectives made of calls: all_gather of objects, and a barrier. They work where MPI's collectives are busy."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mpicoll.rpc import current_agent
from mpicoll.rpc.constants import UNSET_RPC_TIMEOUT
from mpicoll.rpc.options import timeout_seconds

logger = logging.getLogger(__name__)

Key = tuple[tuple[str, ...], int]  # names of the workers that take part, and the number of all_gathers among them before


@dataclass
class _AllGather:
    """One all_gather on one worker. ``complete`` is set when ``objects`` has every worker's object."""

    objects: dict[str, Any] = field(default_factory=dict)
    complete: threading.Event = field(default_factory=threading.Event)


class _AllGathers:
    """The all_gathers of this worker that have begun, here or on another worker."""

    def __init__(self) -> None:
        self.guard = threading.Lock()  # guards what follows, and the objects of each all_gather
        self._pending: defaultdict[Key, _AllGather] = defaultdict(_AllGather)
        self._counts: defaultdict[tuple[str, ...], itertools.count[int]] = defaultdict(itertools.count)

    def clear(self) -> None:
        """Forgets all_gathers of an earlier RPC."""
        with self.guard:
            self._pending.clear()
            self._counts.clear()

    def begin(self, names: tuple[str, ...]) -> tuple[Key, _AllGather]:
        """Returns this worker's next all_gather among these workers."""
        with self.guard:
            key = names, next(self._counts[names])
            return key, self._pending[key]

    def find(self, key: Key) -> _AllGather:
        """Returns an all_gather that another worker has named; this one may come to it later."""
        with self.guard:
            return self._pending[key]

    def end(self, key: Key) -> None:
        with self.guard:
            del self._pending[key]


_all_gathers = _AllGathers()
begin = _all_gathers.clear  # called by init_rpc


def all_gather(obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Gathers an object of every worker, by name (collective over these workers).

    Args:
        obj: This worker's object; anything that can be pickled.
        worker_names: The workers that take part, including this one; None: all.
        timeout: Seconds for each step; 0: no limit; -1: the agent's for the calls, no limit for the wait.

    Raises:
        RuntimeError: A step took longer. Names the workers.
    """
    agent = current_agent.get()
    names = tuple(sorted(set(worker_names or agent.workers.by_name)))
    leader, me = names[0], agent.me.name
    timeout_s = timeout_seconds(timeout)
    key, state = _all_gathers.begin(names)
    if me == leader:
        _give(key, me, obj)
    else:
        agent.call(agent.workers.find(leader), _give, (key, me, obj), timeout_s=timeout_s).wait()
    try:
        if not state.complete.wait(timeout_s or None):
            late = [name for name in names if name not in state.objects] if me == leader else [leader]
            raise RuntimeError(f"_all_gather: nothing has come from workers {late} within {timeout_s:.2f} seconds")
        if me == leader:
            _give_to_followers(key, state, agent.timeout_s if timeout_s is None else timeout_s)
        return state.objects
    finally:
        _all_gathers.end(key)


def _give_to_followers(key: Key, state: _AllGather, timeout_s: float) -> None:
    """Sends what the leader has gathered to the other workers."""
    agent = current_agent.get()
    followers = [agent.workers.find(name) for name in key[0][1:]]
    answers = [(worker.name, agent.call(worker, _take, (key, state.objects), timeout_s=timeout_s)) for worker in followers]
    errors: dict[str, Exception] = {}
    for name, answer in answers:
        try:
            answer.wait()
        except RuntimeError as error:
            errors[name] = error
    if errors:
        raise RuntimeError(
            f"Followers {[*errors]} timed out in _all_gather after {timeout_s:.2f} seconds. The first "
            f"exception is {next(iter(errors.values()))}"
        )


def _give(key: Key, name: str, obj: Any) -> None:
    """Runs on the leader, called by each other worker."""
    state = _all_gathers.find(key)
    with _all_gathers.guard:
        state.objects[name] = obj
        if len(state.objects) == len(key[0]):
            state.complete.set()


def _take(key: Key, objects: dict[str, Any]) -> None:
    """Runs on the other workers, called by the leader."""
    state = _all_gathers.find(key)
    state.objects = objects
    state.complete.set()


def barrier(worker_names: Iterable[str]) -> None:
    """Returns when these workers have called it. A failed step is logged and ends the wait, as in torch."""
    try:
        all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")
