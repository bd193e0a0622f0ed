"""The store: rank 0 opens a TCPStore on a free port, and where it is travels by MPI.

Nothing in the environment is needed, and a host name that does not resolve, or resolves to a loopback address (Debian's
127.0.1.1), does no harm: rank 0 sends every address it knows of itself, and each rank takes the first that answers.
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

from mpicoll._mpi import runtime
from mpicoll.errors import LaunchError

__all__ = ["meet"]

LOOPBACK = "127.0.0.1"
PROBE_S = 3.0  # seconds for one connection to one address; a live one answers in milliseconds, a firewall never
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


@dataclass(frozen=True)
class Place:
    """Where rank 0 has opened the store, or why it could not."""

    hostname: str
    port: int = 0
    addresses: tuple[str, ...] = ()  # names and numbers under which other hosts may reach it, best first
    error: str = ""


def meet(timeout: timedelta = default_pg_timeout, **_: Any) -> tuple[Store, int, int]:
    """A store shared by all ranks, this rank, the number of ranks (collective over MPI's world).

    Sets MASTER_ADDR and MASTER_PORT where they are unset, for programs that read them.

    Raises: LaunchError: on all ranks, if one of them cannot reach rank 0 at any address.
    """
    there = runtime.start()
    with there.lock:
        comm = there.base.Dup()
    try:
        return _meet(there, comm, timeout), there.rank, there.size
    finally:
        comm.Free()


def _meet(there: runtime.Runtime, comm: Any, timeout: timedelta) -> Store:
    store: Store | None = None
    place: Place | None = None
    if there.rank == 0:
        store, place = _open(there.hostname, timeout)
    place = comm.bcast(place, root=0)
    assert place is not None
    if place.error:
        raise LaunchError(f"init_process_group: rank 0 on {place.hostname} could not open a store: {place.error}")
    address, error = _find(place, there.hostname, there.rank) if there.rank else (LOOPBACK, "")
    answers = comm.allgather((address, error))
    errors = [text for _, text in answers if text]
    if errors:
        raise LaunchError("init_process_group: " + "; ".join(errors))
    error = ""
    if store is None:
        try:
            store = TCPStore(address, place.port, None, False, timeout=timeout, wait_for_workers=False)
        except Exception as failure:  # noqa: BLE001  the other ranks wait for the answer
            error = f"rank {there.rank} on {there.hostname} could not connect: {type(failure).__name__}: {failure}"
    # Also so that rank 0's store, which goes when init_process_group fails, lives until everybody is connected.
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
    """This host's name, and its IPv4 addresses for where the name does not resolve; no name server is asked here."""
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
    """The address at which this rank reaches the store, or "" and the reason."""
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
    """Numeric addresses of `name`; loopback ones count only on rank 0's own host."""
    entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(str(entry[4][0]) for entry in entries)
    return [address for address in addresses if same_host or not _is_loopback(address)]
