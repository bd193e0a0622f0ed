"""Sends objects to workers as messages, and counts messages for the graceful shutdown (drain.py)."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

from mpicoll.autograd import contexts
from mpicoll.errors import WorkerLeft
from mpicoll.rpc import wire
from mpicoll.rpc.options import DeviceMaps
from mpicoll.rpc.pending_calls import PendingCalls
from mpicoll.rpc.transport import Transport
from mpicoll.rpc.workers import WorkerInfo


class Messenger:
    """Packs and sends. Any thread may call every method."""

    def __init__(self, transport: Transport, calls: PendingCalls, device_maps: DeviceMaps) -> None:
        self.sent = 0  # messages
        self.received = 0  # messages that have been dealt with; a call counts once it has been answered
        self._transport, self._calls, self._device_maps = transport, calls, device_maps
        self._guard = threading.Lock()  # guards the counts
        self._numbers = itertools.count(1)  # of messages

    def send(self, kind: int, worker: WorkerInfo, call: int, obj: Any) -> None:
        """Starts sending an object. ``call``: number of the call that the message belongs to; 0: none.

        Raises:
            WorkerLeft: The worker has left, or MPI could not send to it.
            MpicollError: RPC has ended.
            MemoryError: There is none for a message to oneself.
            Exception: Whatever pickling raises.
        """
        number = next(self._numbers)
        device_map = self._device_maps.to(worker.name, answer=kind == wire.RESULT)
        state = wire.PicklingState(worker.id, device_map, contexts.current() is not None)
        message = wire.pack(kind, call, number, obj, partial(contexts.attach, to=worker.id), state)
        self._calls.check_open(worker)
        with self._guard:
            self.sent += 1
        try:
            self._transport.send(worker.id, message)
        except Exception as error:
            if self._transport.is_here(worker.id):  # this process lacks memory, and nothing is wrong with the worker
                with self._guard:
                    self.sent -= 1
                raise
            self.lose(worker, f"MPI could not send to it: {error}")
            raise WorkerLeft(f"worker {worker.name!r} (rank {worker.id}): {error}") from error

    def count_received(self) -> None:
        with self._guard:
            self.received += 1

    def lose(self, worker: WorkerInfo, reason: str) -> None:
        """Gives up the messages to and from a worker that has left, and fails the calls to it."""
        self._transport.lose(worker.id)
        self._calls.lose(worker, reason)
