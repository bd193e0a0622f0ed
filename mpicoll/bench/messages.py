"""Messages between ranks 0 and 1, by the definitions of the OSU micro-benchmarks; other ranks have no part.

latency      half of a round trip of a blocking send and recv
bandwidth    a window of 64 isends from one buffer into one buffer, acknowledged by one small message; a call is the window
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll.bench import raw_mpi
from mpicoll.bench.formulas import WINDOW
from mpicoll.bench.operations import Call, Memory, Operation, Shape


def latency(s: Shape) -> Operation:
    """A call is the round trip; halved where it is reported, see row.py."""
    if s.rank > 1:
        return Operation(Memory(), lambda dist, group: None, (lambda: None) if s.moves else None)
    mine, theirs, peer = s.empty(s.count), s.empty(s.count), 1 - s.rank
    memory = Memory([(mine, s.of(s.rank))], [(theirs, s.of(peer))])

    def call_through(dist: Any, group: Any) -> Call:
        send, recv = dist.send, dist.recv

        def first() -> None:
            send(mine, peer, group)
            recv(theirs, peer, group)

        def second() -> None:
            recv(theirs, peer, group)
            send(mine, peer, group)

        return first if s.rank == 0 else second

    raw = (lambda: raw_mpi.ping_pong(theirs.numpy(), mine.numpy())) if s.moves else None
    return Operation(memory, call_through, raw)


def bandwidth(s: Shape) -> Operation:
    if s.rank > 1:
        return Operation(Memory(), lambda dist, group: None, (lambda: None) if s.moves else None)
    x, done = s.empty(s.count), s.empty(1)
    memory = Memory([(x, s.of(0))]) if s.rank == 0 else Memory([], [(x, s.of(0))])

    def call_through(dist: Any, group: Any) -> Call:
        isend, irecv, send, recv = dist.isend, dist.irecv, dist.send, dist.recv

        def first() -> None:
            for work in [isend(x, 1, group) for _ in range(WINDOW)]:
                work.wait()
            recv(done, 1, group)

        def second() -> None:
            for work in [irecv(x, 0, group) for _ in range(WINDOW)]:
                work.wait()
            send(done, 0, group)

        return first if s.rank == 0 else second

    raw = (lambda: raw_mpi.stream(x.numpy(), x.numpy(), WINDOW)) if s.moves else None
    return Operation(memory, call_through, raw)


MESSAGES: dict[str, Callable[[Shape], Operation]] = {"latency": latency, "bandwidth": bandwidth}
