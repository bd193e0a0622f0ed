"""The supervisor's side of the connections to the monitors of the ranks (`mpicoll._launch.monitor`), and the first cause.

A monitor proves by the job's secret that it belongs to the job. The secret travels in the environment, never on a command line.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import re
import resource
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mpicoll._launch import linux
from mpicoll._launch.monitor import LOOPBACK
from mpicoll._launch.output import Fatal

LONGEST_LINE = 1 << 14  # bytes
DISCARD_PORT = 9  # any port: a UDP socket that is connected sends nothing
MPI_ERR_UNKNOWN = 14  # the exit status of a rank that Open MPI ends because its connection to another rank was closed
SOON_NS = 500_000_000  # until the cause reports; Open MPI's mpiexec sends SIGKILL later: 1 s after SIGTERM


@dataclass
class Rank:
    """What is known about one rank. Times: nanoseconds since the epoch, by the clock of the host of the rank."""

    number: int
    pid: int
    host: str
    why: str = ""
    why_at: int = 0
    why_status: int = 1
    traceback: bool = False  # it prints one for ``why``, unless another rank has printed the same
    culprit: tuple[int, bool] | None = None  # another rank that ``why`` is about; whether its process had ended before
    was: str = ""  # what it was doing, and how long before its end
    status: int | None = None  # negative: a signal
    returned: bool = False
    left: bool | None = None  # by os._exit(0); whether MPI still ran
    oom: bool = False  # during its life the kernel has killed a process of its host or container for lack of memory
    alone: bool = False  # its program has used torch, and no other rank
    ended_at: int = 0
    lost: bool = False  # its connection broke before it reported an end

    def failed(self) -> bool:
        ended_ill = self.status not in (None, 0) or (self.status == 0 and bool(self.left))
        return self.lost or ended_ill or (self.status is None and self.why != "")

    def left_early(self) -> bool:
        """Whether it ended with status 0 before the end of its program, by os._exit(0), and MPI may still have run."""
        return self.status == 0 and not self.returned and self.left is not False

    def at(self) -> int:
        return self.why_at or self.ended_at

    def how(self) -> str:
        if self.why:
            return self.why
        if self.lost:
            return "its host or its monitor was lost"
        return self._end() + (f"; {self.was}" if self.was else "")

    def _end(self) -> str:
        if self.left_early():
            return "exit status 0 before the end of its program, by os._exit" + ", without MPI_Finalize" * bool(self.left)
        assert self.status is not None
        hint = " (out of memory?)" * self.oom
        return f"killed by {signal_name(-self.status)}{hint}" if self.status < 0 else f"exit status {self.status}"

    def exit_status(self) -> int:
        return self.why_status if self.why else shell_status(self.status or 1)


def shell_status(status: int) -> int:
    """The exit status by which a shell would name this end: 128 + signal."""
    return 128 - status if status < 0 else status


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class Connection:
    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self.data = b""
        self.rank: Rank | None = None  # None: it has not said the secret


class Reports:
    """Listens for monitors on ``selector``, whose keys' data are functions without arguments."""

    def __init__(self, selector: selectors.BaseSelector, address: str, secret: str) -> None:
        self.ranks: dict[int, Rank] = {}
        self.size: int | None = None  # of the job, once a rank has begun
        self.alike: list[int] = []  # ranks that need not print their error, because another rank has the same one
        self._reasons: dict[str, int] = {}  # without its numbers, and the first rank that has printed a traceback for it
        self._selector, self._secret = selector, secret
        self._connections: set[Connection] = set()
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Breaks all connections: the monitors end what still runs."""
        for connection in list(self._connections):
            self._drop(connection)
        self._stop_listening()
        self._listener.close()

    def _stop_listening(self) -> None:
        if self._listener in self._selector.get_map():
            self._selector.unregister(self._listener)

    def connected(self) -> bool:
        """Whether a monitor is still there."""
        return any(connection.rank is not None for connection in self._connections)

    def all_ended(self) -> bool:
        return self.size == len(self.ranks) and all(rank.status is not None for rank in self.ranks.values())

    def failed(self) -> bool:
        return any(rank.failed() for rank in self.ranks.values())

    def first_cause(self, fatal: Fatal | None = None) -> Rank | None:
        """The rank that failed first, or left its program early by os._exit(0); None: all that have begun have ended well.

        ``fatal``: where MPICH has ended the job. It ends the other ranks, some with the same status, and any of them may report
        first. And the end of a process closes its connections before its parent sees the end: a neighbour that Open MPI ends for
        that may report first.
        """
        first = min((rank for rank in self.ranks.values() if rank.failed() or rank.left_early()), key=Rank.at, default=None)
        if first is not None and first.culprit is not None:
            return self._culprit(first, *first.culprit)
        aborted = None if fatal is None else self.ranks.get(fatal.rank)
        if fatal and aborted and first and not first.why and first.status in (fatal.status, aborted.status):
            hint = "the calls of the ranks differ, and with MPICOLL_CHECK=1 both are named" if "truncated" in fatal.text else ""
            aborted.why, aborted.why_status = "; ".join(filter(None, (fatal.text, hint, aborted.was))), fatal.status
            return aborted
        if first is None or first.why or first.status != MPI_ERR_UNKNOWN:
            return first
        killed = [rank for rank in self.ranks.values() if (rank.status or 0) < 0 and rank.status != -signal.SIGTERM]
        causes = [rank for rank in killed if rank.ended_at < first.ended_at + SOON_NS]
        return min(causes, key=Rank.at, default=first)

    def _culprit(self, first: Rank, number: int, ended: bool) -> Rank:
        """The rank that ``first`` has waited for: with its own failure if it had ended, else with what ``first`` says.

        Its monitor may report later: on a busy host, or where many ranks wait and never leave the cores.
        """
        rank = self.ranks.get(number) or Rank(number, 0, "")
        own = ended and rank.status is not None and (rank.failed() or rank.left_early())
        return rank if own else replace(rank, why=first.why, why_at=first.why_at, why_status=first.why_status)

    def tell(self, word: str) -> None:
        """Sends ``end``, ``kill`` or ``signal NUMBER`` to every monitor."""
        for connection in list(self._connections):
            if connection.rank is not None:
                self._send(connection, word)

    def _send(self, connection: Connection, word: str) -> None:
        with contextlib.suppress(OSError):  # it has ended; what it has reported may still have to be read
            connection.stream.sendall(word.encode() + b"\n")

    # --- connections ---

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError as error:  # otherwise it has gone again
            if error.errno in (errno.EMFILE, errno.ENFILE) and not _allow_more_files():
                self._stop_listening()
                print(
                    f"mpicoll.run: {error.strerror} (ulimit -n), and it needs one for each rank: it watches "
                    f"{len(self._connections)} ranks, and mpiexec alone the others",
                    file=sys.stderr,
                )
            return
        linux.keep_alive(stream)
        stream.setblocking(False)
        connection = Connection(stream)
        self._connections.add(connection)
        self._selector.register(stream, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.stream.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # reset, or the keepalive has given up
            data = b""
        *lines, connection.data = (connection.data + data).split(b"\n")
        for line in lines:
            if not self._take(connection, line):
                data = b""
                break
        if not data or len(connection.data) > LONGEST_LINE:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.stream)
            connection.stream.close()
            rank = connection.rank
            if rank is not None and rank.status is None:
                rank.lost, rank.ended_at = True, time.time_ns()

    def _take(self, connection: Connection, line: bytes) -> bool:
        """Takes what a line says about a rank. False: the other end is no monitor of this job."""
        if connection.rank is None:
            secret, _, line = line.partition(b" ")
            if not hmac.compare_digest(secret, self._secret.encode()):
                return False
            begin = json.loads(line)
            self.size = begin.pop("size")
            connection.rank = self.ranks[begin["number"]] = Rank(**begin)
            return True
        said, rank = json.loads(line), connection.rank
        first = "why" in said and not rank.why
        if first and said.get("traceback"):
            printed_by = self._reasons.setdefault(re.sub(r"\d+", "", said["why"]), rank.number)
            self.alike += [rank.number] * (printed_by != rank.number)
        if "why" in said:
            self._send(connection, "known" if rank.number in self.alike else "new")
        if first or "why" not in said:  # the first reason counts
            vars(rank).update(said)
        return True


def _allow_more_files() -> bool:
    """Raises this process's limit of open files. It does so late, so that mpiexec and the ranks keep the user's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


def address_towards(hosts: Iterable[str]) -> str:
    """The address of this host on the network of the first of ``hosts`` that has an address; the loopback if none has."""
    for host in hosts:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, DISCARD_PORT))
            return str(probe.getsockname()[0])
    return LOOPBACK


def unknown_hosts(hosts: Iterable[str]) -> list[str]:
    """A sentence for each of these hosts of which no address is known here."""
    said = []
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except (OSError, UnicodeError) as error:
            said.append(f"host {host!r}: {getattr(error, 'strerror', None) or 'no name of a host'}")
    return said
