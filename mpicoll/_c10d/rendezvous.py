"""torch's TCPStore, for the worlds that need it: rank 0 opens it on a free port and sends its address by MPI.

Other worlds have a store without a port (store.py, which says when).

No environment variable is needed. The store listens on one address only:

    all ranks on one host   loopback
    several hosts           an address of rank 0's host that all ranks can reach: that of MASTER_ADDR, if it is set and belongs to
                            that host, otherwise that of the host name, otherwise that of an interface

So a host name may fail to resolve, or resolve to a loopback address (127.0.1.1 on Debian).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from mpicoll._base import processes, torch_variables
from mpicoll._base.errors import LaunchError
from mpicoll._faults import roll_call, watch
from mpicoll._mpi import runtime, survivors
from mpicoll._mpi.channel import check_levels
from mpicoll._mpi.errors import MPIException, not_made
from mpicoll._tensors import checks

LOOPBACK = ("127.0.0.1", "::1")
PROBE_S = 3.0  # seconds for connections; a live address answers in milliseconds, a firewall never
ATTEMPT = timedelta(seconds=1)  # to connect, in a job that goes on when a rank dies
LOOK_S = 0.02  # seconds after which the thread that accepts looks whether all have answered
FURTHER_S = 0.25  # seconds for further addresses after the first has answered
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface

Address = tuple[str, int]  # in numbers, and the port


class Place(NamedTuple):
    """Where rank 0 listens, or why it cannot."""

    hostname: str
    addresses: tuple[Address, ...] = ()  # best first
    error: str = ""


def meet(timeout: timedelta = default_pg_timeout, **_: Any) -> tuple[Store, int, int]:
    """Makes a store that all ranks share (collective over MPI's world).

    Sets MASTER_ADDR and MASTER_PORT if they are unset, for programs that read them.

    Returns:
        The store, this rank and the number of ranks.

    Raises:
        ValueError: The timeout is negative.
        OperationTimeout: A rank did not come in time; names it.
        LaunchError: On all ranks, if one of them cannot reach rank 0 at any address.
        ThreadLevelError: On all ranks, if MPI has different thread levels on them and cannot work so.
        CommunicationError: MPI has no communicator left.
    """
    limit_s = timeout.total_seconds()
    checks.timeout("init_process_group", limit_s)
    with watch.end_job_after("init_process_group", limit_s):
        mpi = runtime.start()
        roll_call.everyone(mpi, "the rendezvous mpi://", limit_s)
        try:
            return _meet(mpi, mpi.comm, timeout), mpi.rank, mpi.size
        except MPIException as raw:
            raise not_made(raw, "init_process_group") from raw


# Note [Few exchanges]
# On a busy machine each exchange takes as long as it takes until every rank has had the processor. So rank 0 opens a store on
# loopback before it knows whether all ranks are on its host. If they are, two exchanges are enough.
def _meet(mpi: runtime.Runtime, comm: Any, timeout: timedelta) -> Store:
    store, place, error = None, Place(mpi.hostname), ""
    if mpi.rank == 0:
        place, listeners = _place(mpi.hostname, LOOPBACK)
        store, error = _open(place.addresses[0], listeners, timeout) if listeners else (None, place.error)
    said = comm.allgather((mpi.thread_level, processes.network(), place, error))
    mpi.thread_levels = tuple(level for level, *_ in said)
    check_levels(mpi.thread_levels)
    if len({network for _, network, *_ in said}) == 1:
        _, _, place, error = said[0]
        address: Address = place.addresses[0] if place.addresses else ("", 0)
    else:
        store = None
        store, address, error = _between_hosts(mpi, comm, timeout)
    if store is None and not error:
        store, error = _connect(address, timeout, f"rank {mpi.rank} on {mpi.hostname}")
    # This exchange also keeps the store of rank 0, which goes if init_process_group fails, until all ranks are connected.
    errors = list(dict.fromkeys(text for text in comm.allgather(error) if text))
    if errors or store is None:
        raise LaunchError("init_process_group: " + "; ".join(errors))
    torch_variables.provide_meeting(*address)
    return store


def _between_hosts(mpi: runtime.Runtime, comm: Any, timeout: timedelta) -> tuple[Store | None, Address, str]:
    """Returns the store on rank 0, its address, which all ranks reach, and why there is none (collective)."""
    place, listeners = _place(mpi.hostname, _own_names(mpi.hostname)) if mpi.rank == 0 else (None, [])
    place = comm.bcast(place, root=0)
    assert place is not None
    if place.error:
        raise LaunchError(f"init_process_group: {place.error}")
    reached, tried = _reachable(place.addresses) if mpi.rank else (set(place.addresses), "")
    with _taking_connections(listeners):
        answers = comm.allgather((mpi.hostname, reached, tried))
    common = [address for address in place.addresses if all(address in known for _, known, _ in answers)]
    if not common:
        for listener in listeners:
            listener.close()
        raise LaunchError("init_process_group: " + _nobody_reaches(place, answers))
    store, error = _open(common[0], listeners, timeout) if mpi.rank == 0 else (None, "")
    return store, common[0], comm.bcast(error, root=0)


def _place(hostname: str, names: Sequence[str]) -> tuple[Place, list[socket.socket]]:
    """Listens on the addresses of these names, on rank 0."""
    listeners = _listen(names)
    text = f"rank 0 on {hostname} could not open a store: it cannot listen on any of "
    error = "" if listeners else text + (", ".join(names) or "its addresses, of which it has none")
    return Place(hostname, tuple(_address(listener) for listener in listeners), error), listeners


def _own_names(hostname: str) -> list[str]:
    """Names and addresses by which other hosts may reach this one, best first; without asking a name server for addresses."""
    found = [os.environ.get("MASTER_ADDR", ""), hostname]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    with contextlib.suppress(OSError):  # a host without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, _, _, scope, *_ = line.split()
            if scope == "00":  # global
                found.append(str(ipaddress.IPv6Address(int(number, 16))))
    return list(dict.fromkeys(name for name in found if name and not _is_loopback(name)))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address.startswith("localhost")


def _listen(names: Sequence[str]) -> list[socket.socket]:
    """Listens on a free port of each address of these names that belongs to this host; on loopback only for its numbers."""
    listeners: dict[str, socket.socket] = {}
    for name in names:
        host = name.encode() if name in LOOPBACK else name  # a str loads the tables of international names, which takes 1 ms
        with contextlib.suppress(OSError):  # a name that does not resolve
            for family, _, _, _, (number, *_) in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
                if number in listeners or (_is_loopback(str(number)) and name not in LOOPBACK):
                    continue
                listener = socket.socket(family, socket.SOCK_STREAM)
                try:
                    listener.bind((number, 0))
                    listener.listen(socket.SOMAXCONN)
                    listeners[str(number)] = listener
                except OSError:  # an address of another host
                    listener.close()
    return list(listeners.values())


def _address(listener: socket.socket) -> Address:
    number, port, *_ = listener.getsockname()
    return number, port


@contextlib.contextmanager
def _taking_connections(listeners: Sequence[socket.socket]) -> Iterator[None]:
    """Inside, a thread accepts and closes connections: what a listener's queue does not hold would find no answer.

    The queue holds net.core.somaxconn connections and one more, 129 in many containers.
    """
    if not listeners:
        yield
        return
    ended = threading.Event()

    def take() -> None:
        with selectors.DefaultSelector() as selector:
            for listener in listeners:
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ, listener)
            while not ended.is_set():
                for key, _ in selector.select(LOOK_S):
                    with contextlib.suppress(OSError):  # it has gone again
                        key.data.accept()[0].close()

    thread = threading.Thread(target=take, name="mpicoll rendezvous", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _reachable(addresses: Iterable[Address]) -> tuple[set[Address], str]:
    """Returns the addresses that answer, and why the others do not. Tries all of them at the same time."""
    errors, reached = {}, set()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        for address in addresses:
            connection = opened.enter_context(socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET))
            connection.setblocking(False)
            try:
                connection.connect(address)
            except BlockingIOError:
                pass
            except OSError as error:
                errors[address] = str(error.strerror or error)
                continue
            selector.register(connection, selectors.EVENT_WRITE, address)
            errors[address] = "no answer"
        deadline = time.monotonic() + PROBE_S
        while selector.get_map() and (remaining := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                selector.unregister(key.fileobj)
                number = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                errors[key.data] = os.strerror(number) if number else ""
                if not number:
                    reached.add(key.data)
                    deadline = min(deadline, time.monotonic() + FURTHER_S)
    return reached, ", ".join(f"{number} port {port}: {error}" for (number, port), error in errors.items() if error)


def _nobody_reaches(place: Place, answers: Sequence[tuple[str, set[Address], str]]) -> str:
    lost = [(rank, hostname, tried) for rank, (hostname, reached, tried) in enumerate(answers) if not reached]
    if not lost:
        return f"no address of rank 0 on {place.hostname} is reached by all ranks; set MASTER_ADDR to one that is"
    return "; ".join(
        f"rank {rank} on {hostname} cannot reach rank 0 on {place.hostname} ({tried})" for rank, hostname, tried in lost
    )


def _open(address: Address, listeners: Sequence[socket.socket], timeout: timedelta) -> tuple[Store | None, str]:
    """Opens the store on the listener with this address, closes the others, and returns it or the reason why there is none."""
    chosen = next(listener for listener in listeners if _address(listener) == address)
    for listener in listeners:
        if listener is not chosen:
            listener.close()
    try:
        return TCPStore(
            *address, None, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=chosen.detach()
        ), ""
    except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
        return None, f"rank 0 could not open a store: {type(error).__name__}: {error}"


def _connect(address: Address, timeout: timedelta, who: str) -> tuple[Store | None, str]:
    """Returns the store, or why there is none. Gives up if a rank has died: the store of a dead rank 0 never answers."""
    deadline = time.monotonic() + timeout.total_seconds()
    limit = min(timeout, ATTEMPT) if survivors.possible() else timeout
    while True:
        try:
            store = TCPStore(*address, None, False, limit, wait_for_workers=False)
        except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
            if time.monotonic() >= deadline or limit == timeout or survivors.lost():
                return None, f"{who} could not connect: {type(error).__name__}: {error}"
        else:
            store.set_timeout(timeout)
            return store, ""
