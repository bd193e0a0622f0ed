"""Messages under way: those that have not left, those whose memory is still arriving, those to oneself."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from mpicoll.mpi.mail import Mailbox
from mpicoll.rpc import wire

SENDING_TESTS = 16  # messages that have not left yet, looked at each time
PIECES = 8  # of a message's memory, moved each time


class Post:
    """Over one mailbox. ``send`` may be called by any thread, ``arrived`` by one at a time."""

    def __init__(self, mailbox: Mailbox, mine: int) -> None:
        self.mailbox = mailbox
        self.mine = mine
        self._sending: deque[tuple[list[Any], wire.Parcel]] = deque()
        self._arriving: list[tuple[list[Any], wire.Arriving]] = []
        self._loop_back: deque[tuple[wire.Parcel, bytes]] = deque()

    def send(self, to: int, parcel: wire.Parcel) -> None:
        """On its way when this returns; its memory may change once it has left. Raises: what MPI raises."""
        if to == self.mine:
            self._loop_back.append((parcel, wire.copy(parcel)))
            return
        requests = self.mailbox.send(to, parcel.envelope, parcel.blocks, parcel.number)
        if not self.mailbox.ended(requests):
            self._sending.append((requests, parcel))

    def arrived(self) -> list[wire.Arriving]:
        """Looks once; the messages that are complete."""
        for _ in range(min(len(self._sending), SENDING_TESTS)):
            entry = self._sending.popleft()
            if not self.mailbox.ended(entry[0], PIECES):
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
            ended = [self.mailbox.ended(requests, PIECES) for requests, _ in self._arriving]
            whole = [message for (_, message), end in zip(self._arriving, ended, strict=True) if end]
            found += [message for message in whole if message.source not in self.mailbox.dead]
            self._arriving = [entry for entry, end in zip(self._arriving, ended, strict=True) if not end]
        return found

    def busy(self) -> bool:
        """Whether memory is on its way: it moves only while both sides look."""
        return bool(self._sending or self._arriving)

    def flush(self, seconds: float) -> None:
        """Waits for what has not left, but no longer than that."""
        deadline = time.monotonic() + seconds
        while self._sending and time.monotonic() < deadline:
            entry = self._sending.popleft()
            if not self.mailbox.ended(entry[0]):
                self._sending.append(entry)
                time.sleep(50e-6)
