"""Messages between ranks 0 and 1, as defined by the OSU micro-benchmarks; other ranks do not take part.

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
    """A call is a round trip; `Harness.row` halves its time."""
    if s.rank > 1:
        return Operation(Memory(), lambda dist, group: None, (lambda: None) if s.moves else None)
    sent, received, peer = s.empty(s.count), s.empty(s.count), 1 - s.rank
    memory = Memory([(sent, s.of(s.rank))], [(received, s.of(peer))])

    def call_through(dist: Any, group: Any) -> Call:
        send, recv = dist.send, dist.recv

        def first() -> None:
            send(sent, peer, group)
            recv(received, peer, group)

        def second() -> None:
            recv(received, peer, group)
            send(sent, peer, group)

        return first if s.rank == 0 else second

    raw = (lambda: raw_mpi.ping_pong(received.numpy(), sent.numpy())) if s.moves else None
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
