"""Messages in flight, and their counts for the graceful shutdown (drain.py)."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpicoll._base.errors import WorkerLeft
from mpicoll._mpi import bell
from mpicoll._mpi.backoff import Backoff, looks
from mpicoll.rpc import wire
from mpicoll.rpc.futures import PendingCalls
from mpicoll.rpc.options import DeviceMaps
from mpicoll.rpc.workers import WorkerInfo

if TYPE_CHECKING:
    from mpicoll._mpi.mailbox import Mailbox

SENDS_PER_LOOK = 16  # messages that `arrived` tests for whether they have left
TESTS_PER_LOOK = 8  # of one message; each test moves a piece of its memory


class Transport:
    """Packs objects, and sends and receives them through a mailbox.

    Queues: the messages that have not left, those that have not arrived whole, and those to this process itself. A worker that
    has left (``calls.left``) completes no message any more: those to and from it are given up.
    Any thread may call `send`; one thread at a time calls `arrived`. Nothing moves unless `arrived` is called.
    """

    def __init__(self, mailbox: Mailbox, rank: int, calls: PendingCalls, device_maps: DeviceMaps) -> None:
        self.sent = 0  # messages
        self.received = 0  # messages that have been dealt with; a call counts once it has been answered
        self._mailbox, self._rank, self._calls, self._device_maps = mailbox, rank, calls, device_maps
        self._guard = threading.Lock()  # guards the counts
        self._numbers = itertools.count(1)  # of messages
        self._sending: deque[tuple[list[Any], int, wire.PackedMessage]] = deque()  # requests, receiver, message
        self._testing = threading.Lock()  # held while some of _sending are not in it
        self._receiving: list[tuple[list[Any], wire.IncomingMessage]] = []
        self._to_itself: deque[wire.IncomingMessage] = deque()
        self._looks = 0  # in which what is under way may move

    def send(self, kind: int, worker: WorkerInfo, call: int, obj: Any) -> None:
        """Starts sending an object. ``call``: number of the call that the message belongs to; 0: none.

        Raises:
            WorkerLeft: The worker has left, or MPI could not send to it.
            MpicollError: RPC has ended.
            MemoryError: There is none for a message to oneself.
            Exception: Whatever pickling raises.
        """
        number = next(self._numbers)
        device_map = self._device_maps.to(worker.name, answer=kind == wire.ANSWER)
        message = wire.pack(kind, call, number, obj, wire.PicklingState(worker.id, device_map))
        self._calls.check_open(worker)
        with self._guard:
            self.sent += 1
        try:
            self.post(worker.id, message)
        except Exception as error:
            if worker.id == self._rank:  # this process lacks memory, and nothing is wrong with the worker
                with self._guard:
                    self.sent -= 1
                raise
            self._calls.lose(worker, f"MPI could not send to it: {error}")
            raise WorkerLeft(f"worker {worker.name!r} (rank {worker.id}): {error}") from error

    def post(self, to: int, message: wire.PackedMessage) -> None:
        """Starts sending a message, which is kept until its memory has left. Raises what MPI raises."""
        if to == self._rank:
            self._to_itself.append(wire.copied(to, message))
            bell.services.wake_own()
            return
        requests = self._mailbox.send(to, message.envelope, message.blocks, message.number)
        if not self._mailbox.ended(requests):
            self._sending.append((requests, to, message))
            self._expect(message.blocks)

    def _expect(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._looks = max(self._looks, looks(sum(nbytes for _, nbytes in blocks)))

    def moving(self) -> bool:
        """Whether messages are under way that may move now. In shared memory they do while both sides call MPI."""
        self._looks -= 1
        return bool(self._sending or self._receiving) and self._looks > 0

    def arrived(self) -> list[wire.IncomingMessage]:
        """Looks once and returns the messages that are complete."""
        self._test_sends()
        complete = []
        while self._to_itself:
            complete.append(self._to_itself.popleft())
        taken = self._mailbox.take()
        if taken is not None:
            message = wire.open_envelope(*taken)
            if message.blocks:
                self._receiving.append((self._mailbox.receive(message.source, message.blocks, message.number), message))
                self._expect(message.blocks)
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
                if receiver in self._calls.left:
                    self._mailbox.keep(requests, message)
                elif not self._mailbox.ended(requests, TESTS_PER_LOOK):
                    self._sending.append(entry)

    def _test_receives(self) -> list[wire.IncomingMessage]:
        complete, incomplete = [], []
        for entry in self._receiving:
            requests, message = entry
            if message.source in self._calls.left:
                self._mailbox.keep(requests, message)
            elif not self._mailbox.ended(requests, TESTS_PER_LOOK):
                incomplete.append(entry)
            elif message.source not in self._mailbox.dead:
                complete.append(message)
        self._receiving = incomplete
        return complete

    def count_received(self) -> None:
        with self._guard:
            self.received += 1

    def flush(self, timeout_s: float) -> None:
        """Waits until every message has left, at most ``timeout_s``. Another thread must call `arrived` meanwhile."""
        deadline, backoff = time.monotonic() + timeout_s, Backoff(spin_s=0.0, yield_s=0.0)
        while time.monotonic() < deadline:
            with self._testing:
                if not self._sending:
                    return
            backoff.pause()
