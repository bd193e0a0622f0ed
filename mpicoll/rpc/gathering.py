"""What workers exchange by calls: every worker's object for every worker, and a barrier."""

from __future__ import annotations

import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from mpicoll.rpc import rref as references
from mpicoll.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT

logger = logging.getLogger(__name__)

Key = tuple[tuple[str, ...], int]  # the workers that take part, and which of their exchanges it is


class _AllGather:
    """One exchange on one worker. ``complete`` is set when ``objects`` has every worker's."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.complete = threading.Event()


_guard = threading.Lock()  # guards what follows
_under_way: defaultdict[Key, _AllGather] = defaultdict(_AllGather)
_counts: defaultdict[tuple[str, ...], itertools.count[int]] = defaultdict(itertools.count)


def begin() -> None:
    """Forgets what an earlier RPC has left."""
    with _guard:
        _under_way.clear()
        _counts.clear()


def all_gather(obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Every worker's object, by name (collective over these workers, by calls: it works where MPI's collectives are busy).

    Args:
        obj: This worker's; anything that can be pickled.
        worker_names: The workers that take part, this one among them; None: all.
        timeout: Seconds for each step; 0: no limit; -1: the agent's for the calls, none for the wait.

    Raises:
        RuntimeError: A step took longer; the text names the workers.
    """
    agent = references.agent()
    names = tuple(sorted(set(worker_names or agent.workers.by_name)))
    leader, me = names[0], agent.me.name
    limit = agent.timeout_s if timeout == UNSET_RPC_TIMEOUT else references.seconds(timeout)
    with _guard:
        key = names, next(_counts[names])
        exchange = _under_way[key]
    if me == leader:
        _give(key, me, obj)
    else:
        agent.call(agent.workers.find(leader), _give, (key, me, obj), timeout_s=limit).wait()
    unlimited = timeout in (UNSET_RPC_TIMEOUT, DEFAULT_SHUTDOWN_TIMEOUT)
    exchange.complete.wait(None if unlimited else timeout)
    if me == leader:
        _tell(key, exchange, limit or 0.0)
    with _guard:
        return _under_way.pop(key).objects


def _tell(key: Key, exchange: _AllGather, limit: float) -> None:
    """The leader gives the followers what it has gathered."""
    agent = references.agent()
    followers = [agent.workers.find(name) for name in key[0][1:]]
    answers = [(worker.name, agent.call(worker, _take, (key, exchange.objects), timeout_s=limit)) for worker in followers]
    errors: list[tuple[str, Exception]] = []
    for name, answer in answers:
        try:
            answer.wait()
        except RuntimeError as error:
            errors.append((name, error))
    if errors:
        raise RuntimeError(
            f"Followers {[name for name, _ in errors]} timed out in _all_gather after {limit:.2f} seconds. The first exception "
            f"is {errors[0][1]}"
        )


def _give(key: Key, name: str, obj: Any) -> None:
    """Runs on the leader."""
    with _guard:
        exchange = _under_way[key]
        exchange.objects[name] = obj
        if len(exchange.objects) == len(key[0]):
            exchange.complete.set()


def _take(key: Key, objects: dict[str, Any]) -> None:
    """Runs on a follower."""
    with _guard:
        exchange = _under_way[key]
    exchange.objects = objects
    exchange.complete.set()


def barrier(worker_names: Iterable[str]) -> None:
    """Returns when these workers are here. A step that fails is logged, and ends the wait, as in torch."""
    try:
        all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")
