"""Messages under way: those that have not left, those whose memory is still arriving, those to oneself."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.mailbox import Mailbox
from mpicoll.rpc import wire

SENDING_TESTS = 16  # messages that have not left yet, looked at each time
PIECES = 8  # of a message's memory, moved each time


class Transport:
    """Over one mailbox. ``send`` may be called by any thread, ``arrived`` by one at a time."""

    def __init__(self, mailbox: Mailbox, mine: int) -> None:
        self.mailbox = mailbox
        self.mine = mine
        self.lost: set[int] = set()  # ranks that will not move what is on its way to them or from them
        self._abandoned: list[Any] = []  # MPI may still write there
        self._sending: deque[tuple[list[Any], int, wire.PackedMessage]] = deque()
        self._testing = threading.Lock()  # held while some of _sending are not in it
        self._arriving: list[tuple[list[Any], wire.IncomingMessage]] = []
        self._loop_back: deque[tuple[wire.PackedMessage, bytes]] = deque()

    def send(self, to: int, message: wire.PackedMessage) -> None:
        """On its way when this returns; its memory may change once it has left. Raises: what MPI raises."""
        if to == self.mine:
            self._loop_back.append((message, wire.copy(message)))
            return
        requests = self.mailbox.send(to, message.envelope, message.blocks, message.number)
        if not self.mailbox.ended(requests):
            self._sending.append((requests, to, message))

    def arrived(self) -> list[wire.IncomingMessage]:
        """Looks once; the messages that are complete."""
        with self._testing:
            for _ in range(min(len(self._sending), SENDING_TESTS)):
                entry = self._sending.popleft()
                if entry[1] in self.lost:
                    self._abandoned.append(entry)
                elif not self.mailbox.ended(entry[0], PIECES):
                    self._sending.append(entry)
        found = []
        while self._loop_back:
            found.append(wire.open_copy(self.mine, *self._loop_back.popleft()))
        taken = self.mailbox.take()
        if taken is not None:
            message = wire.open_envelope(*taken)
            if message.blocks:
                self._arriving.append((self.mailbox.receive(message.source, message.blocks, message.number), message))
            else:
                found.append(message)
        if self._arriving:
            found += self._whole()
        return found

    def _whole(self) -> list[wire.IncomingMessage]:
        """Of those whose memory was still arriving."""
        found, still = [], []
        for entry in self._arriving:
            requests, message = entry
            if message.source in self.lost:
                self._abandoned.append(entry)
            elif not self.mailbox.ended(requests, PIECES):
                still.append(entry)
            elif message.source not in self.mailbox.dead:
                found.append(message)
        self._arriving = still
        return found

    def busy(self) -> bool:
        """Whether memory is on its way: it moves only while both sides look."""
        return bool(self._sending or self._arriving)

    def flush(self, seconds: float) -> None:
        """Waits for what has not left, but no longer than that; somebody must be looking."""
        deadline, backoff = time.monotonic() + seconds, Backoff.background()
        while time.monotonic() < deadline:
            with self._testing:
                if not self._sending:
                    return
            backoff.pause()
