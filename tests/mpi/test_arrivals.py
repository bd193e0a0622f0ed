"""Messages whose size is not known before: found and received without matched probes."""

import ast
from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

from mpicoll._mpi import arrivals, runtime
from tests.project.sources import MODULES, name, tree
from tests.support import agree, everyone

TAG = 5  # not one of the package's


def test_objects_of_any_size_come_in_the_order_of_their_sender(rank: int, size: int) -> None:
    comm = MPI.COMM_WORLD.Dup()
    for number in range(6):
        arrivals.send(comm, (rank, number, "x" * 10**number), range(size), TAG)
    received: list[tuple[int, tuple[int, int, str]]] = []
    while len(received) < 6 * size:
        received += arrivals.objects(comm, TAG)
    expected = {other: [(other, number, "x" * 10**number) for number in range(6)] for other in range(size)}
    agree({other: [content for source, content in received if source == other] for other in range(size)} == expected)
    comm.Free()


def test_what_nobody_waits_for_is_kept_until_it_has_ended(rank: int) -> None:
    comm, in_flight = MPI.COMM_WORLD.Dup(), runtime.process.in_flight
    memory = bytearray(8)
    arrivals.keep([comm.Issend(memory, rank, TAG)], memory)  # does not end before it is received
    arrivals.keep([])
    before = [kept for _, kept in in_flight if kept is memory]
    arrived = arrivals.first(comm, rank, TAG)
    while arrived is None:
        arrived = arrivals.first(comm, rank, TAG)
    arrived.received(comm)
    while any(kept is memory for _, kept in in_flight):
        arrivals.keep([])
    agree(before == [memory] and [each for each in in_flight if not each[0]] == [([], None)], f"{len(before)} {in_flight}")
    comm.Free()


def given(monkeypatch: pytest.MonkeyPatch, messages: list[Any], ended: Callable[[list[MPI.Request]], bool]) -> None:
    """Adds messages without requests to those in flight, and lets ``ended`` be what MPI says of them.

    The watchdog's thread may send its own meanwhile. (It met a stand-in for MPI here.)
    """
    original = arrivals._ended
    monkeypatch.setattr(arrivals, "_ended", lambda requests: original(requests) if requests else ended(requests))
    runtime.process.in_flight.extend(messages)


def taken() -> set[object]:
    """Removes the messages without requests; returns their memory."""
    in_flight = runtime.process.in_flight
    found = [message for message in in_flight if not message[0]]
    for message in found:
        in_flight.remove(message)
    return {memory for _, memory in found if memory is not None}


def test_threads_that_keep_messages_at_once_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread keeps memory while this one tests what is kept. (The third was lost while MPI still used it.)"""
    first, second, third = list[MPI.Request](), list[MPI.Request](), list[MPI.Request]()
    in_flight = [(first, "first"), (second, "second"), (third, "third")]
    others, done = ["of another thread"], list[object]()

    def ended(requests: list[MPI.Request]) -> bool:
        if requests is second and others:
            done.append(first)
            arrivals.keep([], others.pop())
        return any(requests is one for one in done)

    given(monkeypatch, in_flight, ended)
    arrivals.keep([], "last")
    assert taken() - {"first"} == {"second", "third", "of another thread", "last"}


def test_an_error_loses_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    in_flight = [([], "first"), ([], "second")]

    def ended(requests: list[MPI.Request]) -> bool:
        raise RuntimeError("MPI failed")

    given(monkeypatch, in_flight, ended)
    with pytest.raises(RuntimeError, match="MPI failed"):
        arrivals.keep([], "last")
    assert taken() == {"first", "second", "last"}


def test_a_message_stays_until_it_is_received(rank: int, size: int) -> None:
    comm = MPI.COMM_WORLD.Dup()
    assert arrivals.first(comm, MPI.ANY_SOURCE, TAG) is None
    everyone(None)
    request = comm.Isend(bytes(3), (rank + 1) % size, TAG)
    while (arrived := arrivals.first(comm, MPI.ANY_SOURCE, TAG)) is None:
        pass
    same = arrivals.first(comm, arrived.source, MPI.ANY_TAG) == arrived == ((rank - 1) % size, TAG, 3)
    content = arrived.received(comm)
    request.Wait()
    agree(same and content == bytes(3) and arrivals.first(comm, MPI.ANY_SOURCE, TAG) is None, arrived)
    comm.Free()


def test_no_matched_probes() -> None:
    """Note [No matched probes]. `comm.recv` of mpi4py uses them too."""
    matched = {"Improbe", "improbe", "Mprobe", "mprobe", "recv", "irecv", "sendrecv"}
    wrong = [
        f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in matched and ast.unparse(node.value).endswith(("comm", "COMM_WORLD"))
    ]
    assert not wrong, "these need a matched probe; use `mpicoll._mpi.arrivals`:\n" + "\n".join(wrong)
