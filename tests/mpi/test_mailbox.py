"""Messages of remote calls."""

import pytest
from mpi4py import MPI

from mpicoll._mpi import mailbox


def test_threads_that_keep_memory_at_once_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread keeps memory while this one tests what is kept. (The third was lost while MPI still used it.)"""
    first, second, third = list[MPI.Request](), list[MPI.Request](), list[MPI.Request]()
    kept: list[tuple[list[MPI.Request], object]] = [(first, "first"), (second, "second"), (third, "third")]
    monkeypatch.setattr(mailbox, "_kept", kept)
    box = object.__new__(mailbox.Mailbox)
    others, done = ["of another thread"], list[object]()

    def ended(requests: list[MPI.Request]) -> bool:
        if requests is second and others:
            done.append(first)
            box.keep([], others.pop())
        return any(requests is one for one in done)

    monkeypatch.setattr(box, "ended", ended, raising=False)
    box.keep([], "last")
    assert {memory for _, memory in kept} - {"first"} == {"second", "third", "of another thread", "last"}


def test_an_error_loses_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[list[MPI.Request], object]] = [([], "first"), ([], "second")]
    monkeypatch.setattr(mailbox, "_kept", kept)
    box = object.__new__(mailbox.Mailbox)

    def ended(requests: list[MPI.Request]) -> bool:
        raise RuntimeError("MPI failed")

    monkeypatch.setattr(box, "ended", ended, raising=False)
    with pytest.raises(RuntimeError, match="MPI failed"):
        box.keep([], "last")
    assert {memory for _, memory in kept} == {"first", "second", "last"}
