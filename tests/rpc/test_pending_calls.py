"""Pending calls without MPI: each way in which a call leaves."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from mpicoll.errors import MpicollError, WorkerLeft
from mpicoll.rpc.futures import CallFuture, CallTimedOut
from mpicoll.rpc.pending_calls import PendingCall, PendingCalls
from mpicoll.rpc.workers import Workers, this_process


@pytest.fixture
def workers() -> Workers:
    return Workers([("a", 0), ("b", 1)])


def pending(workers: Workers, rank: int, timeout_s: float = 0.0) -> PendingCall:
    return PendingCall(CallFuture(lambda future: None), workers.all[rank], "f", timeout_s)


def at_once(function: Callable[[], None]) -> None:
    function()


def test_an_answer_takes_its_call_once(workers: Workers) -> None:
    calls, call = PendingCalls(workers), pending(workers, 0)
    number = calls.add(call)
    assert (calls.find(number), calls.take(number), calls.take(number), len(calls)) == (call, call, None, 0)


def test_calls_expire_at_their_timeout(workers: Workers) -> None:
    calls = PendingCalls(workers)
    short, unlimited, answered = pending(workers, 0, 0.01), pending(workers, 0), pending(workers, 0, 0.01)
    calls.add(short), calls.add(unlimited)
    calls.take(calls.add(answered))
    calls.expire(at_once)
    assert not short.future.done()
    time.sleep(0.02)
    calls.expire(at_once)
    with pytest.raises(CallTimedOut, match=r"10 ms.*f on worker 'a' \(rank 0\)"):
        short.future.wait()
    assert len(calls) == 1
    assert not unlimited.future.done()
    assert not answered.future.done()


def test_deadlines_of_completed_calls_are_dropped(workers: Workers) -> None:
    calls = PendingCalls(workers)
    for _ in range(3000):
        calls.take(calls.add(pending(workers, 0, 60.0)))
    assert len(calls._deadlines) < 2000


def test_calls_to_a_worker_that_leaves_fail(workers: Workers) -> None:
    calls, lost, other = PendingCalls(workers), pending(workers, 1), pending(workers, 0)
    calls.add(lost), calls.add(other)
    calls.lose(workers.all[1], "it died")
    calls.lose(workers.all[1], "a later reason")
    with pytest.raises(WorkerLeft, match=r"'b' \(rank 1\) has left before it answered f: it died"):
        lost.future.wait()
    assert not other.future.done()
    with pytest.raises(WorkerLeft, match="has left: it died"):
        calls.add(pending(workers, 1))


def test_closing_fails_all_calls(workers: Workers) -> None:
    calls, call = PendingCalls(workers), pending(workers, 1)
    calls.add(call)
    calls.close("the end")
    with pytest.raises(WorkerLeft, match="RPC was shut down before worker 'b'"):
        call.future.wait()
    with pytest.raises(MpicollError, match="the end"):
        calls.add(pending(workers, 0))


def test_what_is_known_of_a_process() -> None:
    """Its state, if it is on the node of this one."""
    mine = this_process("one")
    assert Workers([("a", 0)], {0: mine}).process(0) == f"its process {mine.pid} on host one runs"
    there = mine._replace(hostname="two", node=("two",))
    workers = Workers([("a", 0), ("b", 1), ("c", 2)], {0: mine, 1: there})
    assert workers.process(1) == f"its process {mine.pid} on host two cannot be seen from this node"
    assert workers.process(2) == "nothing is known of its process"
    assert not any(workers.has_ended(rank) for rank in range(3))
