"""How a rank finds rank 0's store: by the first address that answers, whatever names resolve to."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from mpicoll._c10d import rendezvous
from mpicoll._c10d.rendezvous import LOOPBACK, Place


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind((LOOPBACK, 0))
        server.listen()
        yield server.getsockname()[1]


def test_same_host_needs_no_name(port: int) -> None:
    place = Place("no-such-host.invalid", port, ("no-such-host.invalid",))
    assert rendezvous._find(place, "no-such-host.invalid", 1) == (LOOPBACK, "")


def test_a_loopback_name_leads_nowhere_from_another_host(port: int) -> None:
    """Debian writes 127.0.1.1 for a host's own name; on another host that is another machine."""
    address, error = rendezvous._find(Place("far", port, ("localhost", LOOPBACK)), "here", 3)
    assert address == ""
    assert "rank 3 on here cannot reach rank 0 on far" in error


def test_the_next_address_is_tried(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    known = {"far": ["127.0.0.9"], "10.0.0.1": [LOOPBACK]}
    monkeypatch.setattr(rendezvous, "_resolve", lambda name, same_host: known[name])
    assert rendezvous._find(Place("far", port, ("far", "10.0.0.1")), "here", 1) == (LOOPBACK, "")


def test_all_that_was_tried_is_said(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    def resolve(name: str, same_host: bool) -> list[str]:
        if name == "far":
            raise socket.gaierror(-2, "Name or service not known")
        return ["127.0.0.9"]

    monkeypatch.setattr(rendezvous, "_resolve", resolve)
    address, error = rendezvous._find(Place("far", port, ("far", "10.0.0.1")), "here", 1)
    assert address == ""
    assert "far: Name or service not known, 127.0.0.9: Connection refused" in error


def test_own_addresses_are_no_loopback() -> None:
    found = rendezvous._own_addresses("some-name")
    assert found[0] == "some-name"
    assert not any(rendezvous._is_loopback(address) for address in found)
