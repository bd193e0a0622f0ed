"""The graceful end: every worker has come to its shutdown, and nothing is under way any more, anywhere.

Rounds of counts over all workers: as many messages received as sent, twice the same, and none sent in between (the four-counter
method of Mattern, 1987). Once a worker has left there are no sums over all; then each of the others tells each that its own
calls have ended. Who is called after it has told is called on behalf of somebody who has not.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from mpicoll._mpi.backoff import Backoff
from mpicoll.errors import WorkerLeft

if TYPE_CHECKING:
    from mpicoll.rpc.agent import Agent

ASKED_S = 1.0  # seconds that a worker has to say whether it has come
NAMED = 8  # workers

_waiting = threading.Event()  # this worker is at its shutdown


def drain(agent: Agent, timeout_s: float) -> bool:
    """Returns when that is so (collective); False: some worker has left, and the others have waited for each other.

    Raises: RuntimeError: timeout_s are over (0: no limit); who has not come, or how much is under way.
    """
    deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    before: tuple[int, ...] | None = None
    total = None
    _waiting.set()
    try:
        while True:
            if _somebody_left(agent):
                _after_a_loss(agent, deadline, timeout_s)
                return False
            total = agent.mailbox.begin_sum(agent.counts())
            backoff = Backoff.background()
            while not agent.mailbox.ended(total.requests) and not _somebody_left(agent):
                if time.monotonic() > deadline:
                    raise _late(agent, timeout_s)
                backoff.pause()
            if _somebody_left(agent) or agent.mailbox.dead:
                continue
            sent, received, calls = now = total.numbers()
            if sent == received and not calls and now == before:
                return True
            before = now
            if time.monotonic() > deadline:
                raise RuntimeError(f"shutdown: {sent - received} messages and {calls} calls were under way after {timeout_s:g} s")
            Backoff.background().pause()
    finally:
        _waiting.clear()
        if total is not None and not agent.mailbox.ended(total.requests):
            agent.mailbox.keep(total)


def _somebody_left(agent: Agent) -> bool:
    """As far as this worker knows, or another that has told that it is ready: only then it does."""
    return bool(agent.workers.left or agent.ready)


def _after_a_loss(agent: Agent, deadline: float, timeout_s: float) -> None:
    told, backoff = False, Backoff.background()
    others = {worker.id for worker in agent.workers.all} - {agent.me.id}
    while not told or others - agent.ready - agent.workers.left.keys() or agent.counts()[2]:
        if not told and not agent.counts()[2]:
            agent.tell_ready()
            told = True
        if time.monotonic() > deadline:
            raise _late(agent, timeout_s)
        backoff.pause()


def _late(agent: Agent, timeout_s: float) -> RuntimeError:
    """Asks the others who is missing; an agent answers while its program is elsewhere."""
    others = [worker for worker in agent.workers.all if worker.id != agent.me.id and worker.id not in agent.workers.left]
    asked, missing = [], []
    for worker in others:
        with contextlib.suppress(WorkerLeft):
            asked.append((worker, agent.call(worker, has_come, (), timeout_s=ASKED_S)))
    for worker, future in asked:
        try:
            come = future.wait()
        except WorkerLeft:  # its time was up, too
            come = True
        except RuntimeError:  # no answer is an answer
            come = False
        if not come:
            missing.append(f"{worker.name!r} (rank {worker.id})")
    if not missing:
        return RuntimeError(f"shutdown: every worker has come, but calls were still under way after {timeout_s:g} s")
    names = ", ".join(missing[:NAMED]) + (f" and {len(missing) - NAMED} more" if len(missing) > NAMED else "")
    return RuntimeError(f"shutdown: not every worker has come to its shutdown within {timeout_s:g} s: {names}")


def has_come() -> bool:
    """Whether this worker is at its shutdown."""
    return _waiting.is_set()
