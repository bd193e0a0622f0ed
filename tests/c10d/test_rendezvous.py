"""On which address rank 0's store listens, and how the other ranks find it, whatever names resolve to."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import mpicoll
from mpicoll._c10d import rendezvous
from mpicoll._c10d.rendezvous import LOOPBACK, Place
from tests.support import agree, everyone

LISTENS = "0A"  # in /proc/net/tcp


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as server:
        server.bind((LOOPBACK[0], 0))
        server.listen()
        yield server.getsockname()[1]


def listening() -> set[str]:
    """The addresses and ports on which this process listens, in the kernel's notation: 0100007F:0050 is 127.0.0.1, port 80."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and os.path.lexists(path)}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in own}


def test_loopback_is_listened_on_only_by_number() -> None:
    found = rendezvous._listen(LOOPBACK)
    assert found[0].getsockname()[0] == "127.0.0.1"
    assert not rendezvous._listen(["localhost", "no-such-host.invalid", "192.0.2.1"])
    for listener in found:
        listener.close()


def test_one_listener_for_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a host and its interfaces have the same addresses; addresses of other hosts are left out."""
    known = {"this-host": ["127.0.0.5", "192.0.2.1"], "127.0.0.5": ["127.0.0.5"], "127.0.0.6": ["127.0.0.6"]}

    def resolve(name: str, *_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, 0)) for number in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(rendezvous, "_is_loopback", lambda address: False)
    found = rendezvous._listen(["this-host", "127.0.0.5", "127.0.0.6"])
    assert [listener.getsockname()[0] for listener in found] == ["127.0.0.5", "127.0.0.6"]
    for listener in found:
        listener.close()


def test_more_ranks_than_the_queue_of_a_listener_holds() -> None:
    with socket.socket() as server:
        server.bind((LOOPBACK[0], 0))
        server.listen(1)
        with rendezvous._taking_connections([server]):
            found = [rendezvous._reachable([server.getsockname()]) for _ in range(10)]
        assert found == [({server.getsockname()}, "")] * 10


def test_addresses_that_answer_and_why_others_do_not(port: int) -> None:
    good, closed = (LOOPBACK[0], port), ("127.0.0.9", port)
    reached, tried = rendezvous._reachable([closed, good])
    assert reached == {good}
    assert tried == f"127.0.0.9 port {port}: Connection refused"


def test_all_that_was_tried_is_said() -> None:
    place, address = Place("far", (("10.0.0.1", 1),)), ("10.0.0.1", 1)
    lost = rendezvous._nobody_reaches(place, [("far", {address}, ""), ("here", set(), "10.0.0.1 port 1: no answer")])
    assert lost == "rank 1 on here cannot reach rank 0 on far (10.0.0.1 port 1: no answer)"
    apart = rendezvous._nobody_reaches(place, [("far", {address}, ""), ("a", {address}, ""), ("b", {("10.0.1.1", 2)}, "")])
    assert "no address of rank 0 on far is reached by all ranks; set MASTER_ADDR" in apart


def test_own_names_are_no_loopback_and_master_addr_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "10.9.8.7")
    found = rendezvous._own_names("some-name")
    assert found[:2] == ["10.9.8.7", "some-name"]
    assert not any(rendezvous._is_loopback(address) for address in found)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert rendezvous._own_names("some-name")[0] == "some-name"


@pytest.mark.parametrize("backend", ["gloo", "cpu:mpi,cuda:gloo"])
def test_the_store_of_one_host_listens_on_loopback(backend: str) -> None:
    """Not on all interfaces, where others on the network could reach it. Gloo has a port on each rank."""
    if mpicoll.is_initialized():
        mpicoll.destroy_process_group()
    before = listening()
    dist.init_process_group(backend, init_method="mpi://")
    opened = [each.partition(":")[0] for each in listening() - before]
    agree(opened == ["0100007F"] * (1 + (dist.get_rank() == 0)), opened)
    mpicoll.destroy_process_group()
    everyone("the store is closed")


def test_a_store_in_a_file_opens_no_port(no_world: None, shared_path: Path) -> None:
    before = listening()
    mpicoll.init_process_group("mpi", init_method=f"file://{shared_path}/store")
    tensor = torch.ones(2)
    mpicoll.all_reduce(tensor)
    mpicoll.barrier(mpicoll.new_group())
    agree(tensor[0] == mpicoll.get_world_size() and listening() <= before, listening() - before)
