"""The store: rank 0 opens a TCPStore on a free port and sends its address by MPI.

No environment variable is needed. Rank 0 sends all addresses of its host, and each rank takes the first that answers. So a host
name may fail to resolve, or resolve to a loopback address (127.0.1.1 on Debian).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from mpicoll._mpi import arrival, runtime, time_limit
from mpicoll._tensors import checks
from mpicoll.errors import LaunchError

LOOPBACK = "127.0.0.1"
PROBE_S = 3.0  # seconds for one connection to one address; a live one answers in milliseconds, a firewall never
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


@dataclass(frozen=True)
class Place:
    """The address of the store, or why rank 0 could not open one."""

    hostname: str
    port: int = 0
    addresses: tuple[str, ...] = ()  # names and numbers under which other hosts may reach it, best first
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
    """
    limit_s = timeout.total_seconds()
    checks.timeout("init_process_group", limit_s)
    with time_limit.end_job_after("init_process_group", limit_s):
        mpi = runtime.start()
        arrival.everyone(mpi, "the rendezvous mpi://", limit_s)
        return _meet(mpi, mpi.comm, timeout), mpi.rank, mpi.size


def _meet(mpi: runtime.Runtime, comm: Any, timeout: timedelta) -> Store:
    store: Store | None = None
    place: Place | None = None
    if mpi.rank == 0:
        store, place = _open(mpi.hostname, timeout)
    place = comm.bcast(place, root=0)
    assert place is not None
    if place.error:
        raise LaunchError(f"init_process_group: rank 0 on {place.hostname} could not open a store: {place.error}")
    address, error = _find(place, mpi.hostname, mpi.rank) if mpi.rank else (LOOPBACK, "")
    answers = comm.allgather((address, error))
    errors = [text for _, text in answers if text]
    if errors:
        raise LaunchError("init_process_group: " + "; ".join(errors))
    error = ""
    if store is None:
        try:
            store = TCPStore(address, place.port, None, False, timeout=timeout, wait_for_workers=False)
        except Exception as failure:  # noqa: BLE001  the other ranks wait for the answer
            error = f"rank {mpi.rank} on {mpi.hostname} could not connect: {type(failure).__name__}: {failure}"
    # This exchange also keeps the store of rank 0, which goes if init_process_group fails, until all ranks are connected.
    errors = [text for text in comm.allgather(error) if text]
    if errors or store is None:
        raise LaunchError("init_process_group: " + "; ".join(errors))
    os.environ.setdefault("MASTER_ADDR", next((used for used, _ in answers if used != LOOPBACK), LOOPBACK))
    os.environ.setdefault("MASTER_PORT", str(place.port))
    return store


def _open(hostname: str, timeout: timedelta) -> tuple[Store | None, Place]:
    try:
        # it listens on all interfaces; the address is the one by which rank 0 itself connects
        store = TCPStore(LOOPBACK, 0, None, True, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    except Exception as error:  # noqa: BLE001  the other ranks wait for the answer
        return None, Place(hostname, error=f"{type(error).__name__}: {error}")
    return store, Place(hostname, store.port, tuple(_own_addresses(hostname)))


def _own_addresses(hostname: str) -> list[str]:
    """Returns this host's name and its IPv4 addresses, without asking a name server."""
    found = [hostname]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    return [name for name in found if not _is_loopback(name)] or found


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address.startswith("localhost")


def _find(place: Place, hostname: str, rank: int) -> tuple[str, str]:
    """Returns the address at which this rank reaches the store and "", or "" and the reason why there is none."""
    same_host = hostname == place.hostname
    tried = []
    for name in [LOOPBACK, *place.addresses] if same_host else place.addresses:
        try:
            addresses = _resolve(name, same_host)
        except OSError as error:
            tried.append(f"{name}: {error.strerror or error}")
            continue
        for address in addresses:
            try:
                socket.create_connection((address, place.port), PROBE_S).close()
                return address, ""
            except OSError as error:
                tried.append(f"{address}: {error.strerror or error}")
    return "", (
        f"rank {rank} on {hostname} cannot reach rank 0 on {place.hostname}, port {place.port} "
        f"({', '.join(tried) or 'no usable address'})"
    )


def _resolve(name: str, same_host: bool) -> list[str]:
    """Returns the numeric addresses of ``name``; loopback addresses on the host of rank 0 only."""
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in entries)
    return [address for address in addresses if same_host or not _is_loopback(address)]
