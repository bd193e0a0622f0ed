"""Messages between ranks 0 and 1, as defined by the OSU micro-benchmarks; other ranks do not take part.

latency      half of a round trip of a blocking send and recv
exchange     isend to the other rank, irecv from it, and both waits
bandwidth    a window of 64 isends from one buffer into one buffer, acknowledged by one small message; a call is the window
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpicoll._mpi.library import MPI
from mpicoll.bench.formulas import WINDOW
from mpicoll.bench.operations import Call, Memory, Operation, Shape, mpi_call


def latency(s: Shape) -> Operation:
    """A call is a round trip; `Harness.row` halves its time."""
    if s.rank > 1:
        return _idle(s)
    sent, received, peer = s.empty(s.count), s.empty(s.count), 1 - s.rank
    memory = Memory([(sent, s.of(s.rank))], [(received, s.of(peer))])

    def round_trip(send: Call, receive: Call) -> Call:
        first, second = (send, receive) if s.rank == 0 else (receive, send)
        return lambda: (first(), second())

    def call_through(dist: Any, group: Any) -> Call:
        return round_trip(partial(dist.send, sent, peer, group), partial(dist.recv, received, peer, group))

    def raw() -> Call:
        return round_trip(mpi_call("Send", sent, peer), mpi_call("Recv", received, peer))

    return Operation(memory, call_through, raw if s.moves else None)


def exchange(s: Shape) -> Operation:
    if s.rank > 1:
        return _idle(s)
    sent, received, peer = s.empty(s.count), s.empty(s.count), 1 - s.rank
    memory = Memory([(sent, s.of(s.rank))], [(received, s.of(peer))])

    def exchanged(send: Call, receive: Call, wait: Callable[[list[Any]], object]) -> Call:
        return lambda: wait([send(), receive()])

    def call_through(dist: Any, group: Any) -> Call:
        return exchanged(partial(dist.isend, sent, peer, group), partial(dist.irecv, received, peer, group), _wait)

    def raw() -> Call:
        return exchanged(mpi_call("Isend", sent, peer), mpi_call("Irecv", received, peer), MPI.Request.Waitall)

    return Operation(memory, call_through, raw if s.moves else None)


def bandwidth(s: Shape) -> Operation:
    if s.rank > 1:
        return _idle(s)
    x, done, peer = s.empty(s.count), s.empty(1), 1 - s.rank
    memory = Memory([(x, s.of(0))]) if s.rank == 0 else Memory([], [(x, s.of(0))])

    def window(start: Call, wait: Callable[[list[Any]], object], acknowledge: Call) -> Call:
        return lambda: (wait([start() for _ in range(WINDOW)]), acknowledge())

    def call_through(dist: Any, group: Any) -> Call:
        start, acknowledge = (dist.isend, dist.recv) if s.rank == 0 else (dist.irecv, dist.send)
        return window(partial(start, x, peer, group), _wait, partial(acknowledge, done, peer, group))

    def raw() -> Call:
        start, acknowledge = ("Isend", "Recv") if s.rank == 0 else ("Irecv", "Send")
        return window(mpi_call(start, x, peer), MPI.Request.Waitall, mpi_call(acknowledge, done, peer))

    return Operation(memory, call_through, raw if s.moves else None)


def _idle(s: Shape) -> Operation:
    return Operation(Memory(), lambda dist, group: None, (lambda: None) if s.moves else None)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()


MESSAGES: dict[str, Callable[[Shape], Operation]] = {"latency": latency, "exchange": exchange, "bandwidth": bandwidth}
