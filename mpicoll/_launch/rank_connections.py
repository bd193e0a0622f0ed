"""Connections of all ranks to rank 0, by which they meet without a launcher, learn when a process ends, and send lines of text.

    rank 0      listens until all have come ──► sends the hosts of all ranks
    others      connect, and say who they are   A number of an earlier start of the job answers nothing, and is asked for again

The kernel closes the connections of a process that ends, however it ends. In a world without a launcher (`Liveness`) rank 0
passes the news on. A thread of each rank sleeps until there is some. Its lines after the meeting:

    "RANK why"   this rank fails, or has ended: in both directions
    "end"        the sender has finalised MPI; its connection is about to end
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from mpicoll._base.waits import CONNECT_S
from mpicoll._launch import linux

ENDED = "has ended without MPI_Finalize: it was killed, or called os._exit"


class Connections:
    """The connections of this rank: of rank 0 to all others, of another rank to rank 0.

    Attributes:
        peers: The ranks at the other ends.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.peers: dict[int, socket.socket] = {}
        self._begun: dict[int, bytes] = {}  # lines whose end has not come
        self._selector = selectors.DefaultSelector()
        os.register_at_fork(after_in_child=self._forget)

    def accept(self, listener: socket.socket, key: str, host: str, size: int, limit_s: float) -> dict[int, str]:
        """Meets the others, on rank 0. Returns the hosts of the ranks that have come in time; the others get them too.

        ``key`` is known to the ranks only: a connection that does not begin with it is closed.
        """
        hosts, deadline = {0: host}, time.monotonic() + limit_s
        with listener, contextlib.suppress(TimeoutError):
            while len(hosts) < size:
                listener.settimeout(max(deadline - time.monotonic(), 0.001))
                connection, _ = listener.accept()
                connection.settimeout(CONNECT_S)
                with contextlib.suppress(OSError, ValueError):  # a stranger
                    said, rank, other = json.loads(connection.makefile().readline(1000))
                    if said == key:
                        hosts[rank] = other
                        self._add(rank, connection)
        self.send(json.dumps(hosts))
        return hosts

    def connect(self, address: tuple[str, int], key: str, host: str, limit_s: float) -> dict[int, str]:
        """The same on the other ranks. Raises OSError or ValueError if rank 0 does not answer."""
        with contextlib.ExitStack() as unless_met:
            connection = unless_met.enter_context(socket.create_connection(address, CONNECT_S))
            connection.sendall(f"{json.dumps((key, self._rank, host))}\n".encode())
            connection.settimeout(limit_s)
            hosts = json.loads(connection.makefile("rb", 0).readline())  # unbuffered: `read` gets the next line
            self._add(0, connection)
            unless_met.pop_all()
        return {int(rank): other for rank, other in hosts.items()}

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        linux.keep_alive(connection)
        self.peers[rank], self._begun[rank] = connection, b""
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def read(self, limit_s: float | None = None) -> list[tuple[int, str | None]]:
        """Waits for lines. Returns each with the rank that has sent it; None: its connection has ended, as its process has."""
        found: list[tuple[int, str | None]] = []
        for key, _ in self._selector.select(limit_s):
            rank, data = key.data, b""
            with contextlib.suppress(OSError):
                data = self.peers[rank].recv(65536)
            *lines, self._begun[rank] = (self._begun[rank] + data).split(b"\n")
            found += [(rank, line.decode(errors="replace")) for line in lines]
            if not data:
                self.drop(rank)
                found.append((rank, None))
        return found

    def send(self, line: str, rank: int | None = None) -> None:
        """Sends a line to this rank, or to all."""
        for connection in list(self.peers.values()) if rank is None else [self.peers[rank]]:
            with contextlib.suppress(OSError):  # it has ended; `read` tells
                connection.sendall(f"{line}\n".encode())

    def drop(self, rank: int) -> None:
        self._selector.unregister(self.peers[rank])
        self.peers.pop(rank).close()

    def _forget(self) -> None:
        """Closes the connections in a forked child, which may live longer than the rank."""
        for connection in self.peers.values():
            connection.close()


class Liveness:
    """Learns which ranks end, in a thread.

    Args:
        lost: Called in the thread with the rank that has ended, and why.
    """

    def __init__(self, rank: int, lost: Callable[[int, str], None]) -> None:
        self._rank, self._lost = rank, lost
        self._connections = Connections(rank)
        self.accept, self.connect = self._connections.accept, self._connections.connect
        self._ended = set[int]()  # ranks that have said "end", or why they end
        self._thread = threading.Thread(target=self._watch, name="mpicoll liveness", daemon=True)
        self.start = self._thread.start

    def say(self, why: str) -> None:
        """Tells the other ranks that this one fails."""
        self._connections.send(f"{self._rank} {' '.join(why.split())}")

    def stop(self, limit_s: float) -> None:
        """Says that this rank has ended as it should. Rank 0 waits for the others, so that what it serves lasts."""
        self._connections.send("end")
        if self._rank == 0:
            self._thread.join(limit_s)

    def _watch(self) -> None:
        while self._connections.peers.keys() - self._ended:
            for peer, line in self._connections.read():
                self._take(peer, f"{peer} {ENDED}" if line is None else line)

    def _take(self, peer: int, line: str) -> None:
        number, _, why = line.partition(" ")
        if peer not in self._ended:
            self._ended.update([peer] if line == "end" or int(number) == peer else [])
            if line != "end":
                if self._rank == 0:
                    self._connections.send(line)
                self._lost(int(number), why)
