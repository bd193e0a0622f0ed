"""Connections of all ranks of a world without a launcher to rank 0: they meet by them, and learn when a process ends.

    rank 0      listens until all have come ──► sends the hosts of all ranks
    others      connect, and say who they are   A number of an earlier start of the job answers nothing, and is asked for again

The kernel closes the connections of a process that ends, however it ends, and rank 0 passes the news on. A thread of each rank
sleeps until there is some. Lines after the meeting:

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
from collections.abc import Callable, Sequence

from mpicoll._base.waits import CONNECT_S
from mpicoll._launch import linux

ENDED = "has ended without MPI_Finalize: it was killed, or called os._exit"


class Liveness:
    """The connections of this rank.

    Args:
        lost: Called in the thread with the rank that has ended, and why.
    """

    def __init__(self, rank: int, lost: Callable[[int, str], None]) -> None:
        self._rank, self._lost = rank, lost
        self._peers = dict[int, socket.socket]()
        self._ended = set[int]()  # ranks that have said "end", or why they end
        self._thread = threading.Thread(target=self._watch, name="mpicoll liveness", daemon=True)
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
                        hosts[rank], self._peers[rank] = other, connection
        self._send(json.dumps(hosts))
        return hosts

    def connect(self, address: tuple[str, int], key: str, host: str, limit_s: float) -> dict[int, str]:
        """The same on the other ranks. Raises OSError or ValueError if rank 0 does not answer."""
        with contextlib.ExitStack() as unless_met:
            connection = unless_met.enter_context(socket.create_connection(address, CONNECT_S))
            connection.sendall(f"{json.dumps((key, self._rank, host))}\n".encode())
            connection.settimeout(limit_s)
            hosts = json.loads(connection.makefile().readline())
            self._peers[0] = connection
            unless_met.pop_all()
        return {int(rank): other for rank, other in hosts.items()}

    def start(self) -> None:
        for connection in self._peers.values():
            connection.settimeout(None)
            linux.keep_alive(connection)
        self._thread.start()

    def say(self, why: str) -> None:
        """Tells the other ranks that this one fails."""
        self._send(f"{self._rank} {' '.join(why.split())}")

    def stop(self, limit_s: float) -> None:
        """Says that this rank has ended as it should. Rank 0 waits for the others, so that what it serves lasts."""
        self._send("end")
        if self._rank == 0:
            self._thread.join(limit_s)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, [rank, ""])
            while self._peers.keys() - self._ended:
                for each, _ in selector.select():
                    data = ""
                    with contextlib.suppress(OSError):
                        data = self._peers[each.data[0]].recv(65536).decode(errors="replace")
                    *lines, each.data[1] = (each.data[1] + data).split("\n")
                    if not data:
                        selector.unregister(each.fileobj)
                        del self._peers[each.data[0]]
                        lines = [f"{each.data[0]} {ENDED}"]
                    self._take(each.data[0], lines)

    def _take(self, peer: int, lines: Sequence[str]) -> None:
        for line in lines:
            number, _, why = line.partition(" ")
            if peer not in self._ended:
                self._ended.update([peer] if line == "end" or int(number) == peer else [])
                if line != "end":
                    if self._rank == 0:
                        self._send(line)
                    self._lost(int(number), why)

    def _send(self, line: str) -> None:
        for connection in list(self._peers.values()):
            with contextlib.suppress(OSError):  # it has ended
                connection.sendall(f"{line}\n".encode())

    def _forget(self) -> None:
        """Closes the connections in a forked child, which may live longer than the rank."""
        for connection in self._peers.values():
            connection.close()
