"""Collectives made of calls: all_gather of objects, and a barrier. They work where MPI's collectives are busy."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from mpicoll.rpc.agent import Agent
from mpicoll.rpc.constants import UNSET_RPC_TIMEOUT
from mpicoll.rpc.options import timeout_seconds

logger = logging.getLogger(__name__)

Key = tuple[tuple[str, ...], int]  # names of the workers that take part, and the number of all_gathers among them before


class _AllGathers:
    """The all_gathers of this worker that have begun, here or on another worker."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._objects: defaultdict[Key, dict[str, Any]] = defaultdict(dict)
        self._counts: defaultdict[tuple[str, ...], itertools.count[int]] = defaultdict(itertools.count)

    def clear(self) -> None:
        """Forgets all_gathers of an earlier RPC."""
        with self._changed:
            self._objects.clear()
            self._counts.clear()

    def begin(self, names: tuple[str, ...]) -> Key:
        """Returns the key of this worker's next all_gather among these workers."""
        with self._changed:
            return names, next(self._counts[names])

    def add(self, key: Key, objects: dict[str, Any]) -> None:
        """Adds objects of workers to an all_gather that has begun here, or will begin."""
        with self._changed:
            self._objects[key].update(objects)
            self._changed.notify_all()

    def wait(self, key: Key, timeout_s: float | None) -> dict[str, Any]:
        """Returns the objects when all are here, or those that are here after the timeout. Forgets the all_gather."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._objects[key]) == len(key[0]), timeout_s)
            return self._objects.pop(key)


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
    agent = Agent.get()
    names = tuple(sorted(set(worker_names or agent.workers.by_name)))
    leader, me = names[0], agent.me.name
    timeout_s = timeout_seconds(timeout)
    key = _all_gathers.begin(names)
    if me == leader:
        _add(key, {me: obj})
    else:
        agent.call(agent.workers.find(leader), _add, (key, {me: obj}), timeout_s=timeout_s).wait()
    objects = _all_gathers.wait(key, timeout_s or None)
    if len(objects) < len(names):
        late = [name for name in names if name not in objects] if me == leader else [leader]
        raise RuntimeError(f"_all_gather: nothing has come from workers {late} within {timeout_s:.2f} seconds")
    if me == leader:
        _give_to_followers(key, objects, agent.timeout_s if timeout_s is None else timeout_s)
    return objects


def _add(key: Key, objects: dict[str, Any]) -> None:
    """Runs on the leader, called by each other worker, and then on the others, called by the leader."""
    _all_gathers.add(key, objects)


def _give_to_followers(key: Key, objects: dict[str, Any], timeout_s: float) -> None:
    """Sends what the leader has gathered to the other workers."""
    agent = Agent.get()
    followers = [agent.workers.find(name) for name in key[0][1:]]
    answers = [(worker.name, agent.call(worker, _add, (key, objects), timeout_s=timeout_s)) for worker in followers]
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


def barrier(worker_names: Iterable[str]) -> None:
    """Returns when these workers have called it. A failed step is logged and ends the wait, as in torch."""
    try:
        all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")
