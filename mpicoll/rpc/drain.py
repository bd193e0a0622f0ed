"""The graceful end of RPC: every worker has come to its shutdown, and no message is in flight anywhere.

The workers add up their message counts in rounds. RPC has ended when as many messages have been received as sent, in two
successive rounds with the same numbers (the four-counter method of Mattern, 1987).

After a worker has left, a sum over all ranks is no longer possible. Each remaining worker then tells every other one when its own
calls have finished. A worker that is still called after that is being called on behalf of one that has not finished yet.
"""

from __future__ import annotations

import contextlib
import time

from mpicoll._base.errors import WorkerLeft
from mpicoll._base.waits import HAS_COME_S
from mpicoll._mpi.backoff import Backoff
from mpicoll.rpc import wire
from mpicoll.rpc.agent import Agent

MAX_NAMES = 8  # workers that an error names


def drain(agent: Agent, timeout_s: float) -> bool:
    """Returns when RPC has ended everywhere (collective). False: some worker left before; the others waited for each other.

    Raises:
        RuntimeError: The timeout (0: no limit) has passed. Names the workers that have not come, or how much is in flight.
    """
    deadline = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    before: tuple[int, ...] | None = None
    total = None
    agent.at_shutdown.set()
    try:
        while not _some_worker_left(agent):
            total = agent.mailbox.begin_sum(agent.counts())
            backoff = Backoff(spin_s=0.0, yield_s=0.0)
            while not agent.mailbox.ended(total.requests) and not _some_worker_left(agent):
                if time.monotonic() > deadline:
                    raise _timeout_error(agent, timeout_s)
                backoff.pause()
            if _some_worker_left(agent) or agent.mailbox.dead:
                continue
            sent, received, calls = now = total.numbers()
            if sent == received and not calls and now == before:
                return True
            before = now
            if time.monotonic() > deadline:
                raise RuntimeError(f"shutdown: {sent - received} messages and {calls} calls were under way after {timeout_s:g} s")
            Backoff(spin_s=0.0, yield_s=0.0).pause()
        _drain_without_sums(agent, deadline, timeout_s)
        return False
    finally:
        agent.at_shutdown.clear()
        if total is not None and not agent.mailbox.ended(total.requests):
            agent.mailbox.keep(total.requests, total)


def _some_worker_left(agent: Agent) -> bool:
    """Returns whether this worker knows that one has left, or another has said that it is ready, which implies it."""
    return bool(agent.calls.left or agent.ready)


def _drain_without_sums(agent: Agent, deadline: float, timeout_s: float) -> None:
    is_ready, backoff = False, Backoff(spin_s=0.0, yield_s=0.0)
    others = {worker.id for worker in agent.workers.all} - {agent.me.id}
    while not is_ready or others - agent.ready - agent.calls.left.keys() or agent.counts()[2]:
        if not is_ready and not agent.counts()[2]:
            agent.tell_others(wire.READY)
            is_ready = True
        if time.monotonic() > deadline:
            raise _timeout_error(agent, timeout_s)
        backoff.pause()


def _timeout_error(agent: Agent, timeout_s: float) -> RuntimeError:
    """Asks every other worker whether it has come. Its agent answers even while its program is busy elsewhere."""
    others = [worker for worker in agent.workers.all if worker.id != agent.me.id and worker.id not in agent.calls.left]
    missing = []
    for call in [agent.call(worker, has_come, (), timeout_s=HAS_COME_S) for worker in others]:
        with contextlib.suppress(RuntimeError):
            call.wait()
        # WorkerLeft: it came, and its own timeout has passed. Another error: no answer in time.
        if not (call.value() if call.error is None else isinstance(call.error, WorkerLeft)):
            missing.append(f"{call.worker.name!r} (rank {call.worker.id}), {agent.workers.process(call.worker.id)}")
    if not missing:
        return RuntimeError(f"shutdown: every worker has come, but calls were still under way after {timeout_s:g} s")
    names = "; ".join(missing[:MAX_NAMES]) + (f" and {len(missing) - MAX_NAMES} more" if len(missing) > MAX_NAMES else "")
    return RuntimeError(f"shutdown: not every worker has come to its shutdown within {timeout_s:g} s: {names}")


def has_come() -> bool:
    """Returns whether this worker waits in its shutdown. Called by other workers."""
    return Agent.get().at_shutdown.is_set()
