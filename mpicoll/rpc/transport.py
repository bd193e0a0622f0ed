"""Queues of messages in flight: unsent, partly received, and sent to this process itself."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.mailbox import Mailbox
from mpicoll.rpc import wire

SENDS_PER_LOOK = 16  # messages that `arrived` tests for whether they have left
TESTS_PER_LOOK = 8  # of one message; each test moves a piece of its memory


class Transport:
    """Sends and receives packed messages through a mailbox.

    Any thread may call `send`; one thread at a time calls `arrived`. Nothing moves unless `arrived` is called.
    """

    def __init__(self, mailbox: Mailbox, rank: int) -> None:
        self.mailbox = mailbox
        self._rank = rank
        self._lost: set[int] = set()  # ranks that have left: they complete no message any more
        self._sending: deque[tuple[list[Any], int, wire.PackedMessage]] = deque()  # requests, receiver, message
        self._testing = threading.Lock()  # held while some of _sending are not in it
        self._receiving: list[tuple[list[Any], wire.IncomingMessage]] = []
        self._to_itself: deque[wire.IncomingMessage] = deque()

    def is_here(self, rank: int) -> bool:
        """Returns whether messages to this rank do not leave this process."""
        return rank == self._rank

    def send(self, to: int, message: wire.PackedMessage) -> None:
        """Starts sending. The message is kept until its memory has left. Raises what MPI raises."""
        if self.is_here(to):
            self._to_itself.append(wire.copied(to, message))
            return
        requests = self.mailbox.send(to, message.envelope, message.blocks, message.number)
        if not self.mailbox.ended(requests):
            self._sending.append((requests, to, message))

    def arrived(self) -> list[wire.IncomingMessage]:
        """Looks once and returns the messages that are complete."""
        self._test_sends()
        complete = []
        while self._to_itself:
            complete.append(self._to_itself.popleft())
        taken = self.mailbox.take()
        if taken is not None:
            message = wire.open_envelope(*taken)
            if message.blocks:
                self._receiving.append((self.mailbox.receive(message.source, message.blocks, message.number), message))
            else:
                complete.append(message)
        if self._receiving:
            complete += self._test_receives()
        return complete

    def _test_sends(self) -> None:
        with self._testing:
            for _ in range(min(len(self._sending), SENDS_PER_LOOK)):
                entry = self._sending.popleft()
                requests, receiver, message = entry
                if receiver in self._lost:
                    self.mailbox.keep(requests, message)
                elif not self.mailbox.ended(requests, TESTS_PER_LOOK):
                    self._sending.append(entry)

    def _test_receives(self) -> list[wire.IncomingMessage]:
        complete, incomplete = [], []
        for entry in self._receiving:
            requests, message = entry
            if message.source in self._lost:
                self.mailbox.keep(requests, message)
            elif not self.mailbox.ended(requests, TESTS_PER_LOOK):
                incomplete.append(entry)
            elif message.source not in self.mailbox.dead:
                complete.append(message)
        self._receiving = incomplete
        return complete

    def lose(self, rank: int) -> None:
        """Gives up the messages to and from a rank that has left."""
        self._lost.add(rank)

    def busy(self) -> bool:
        """Returns whether memory is on its way. It moves only while both sides look."""
        return bool(self._sending or self._receiving)

    def flush(self, timeout_s: float) -> None:
        """Waits until every message has left, at most ``timeout_s``. Another thread must call `arrived` meanwhile."""
        deadline, backoff = time.monotonic() + timeout_s, Backoff.background()
        while time.monotonic() < deadline:
            with self._testing:
                if not self._sending:
                    return
            backoff.pause()
