"""The threads that receive and run calls, without MPI."""

import threading
import time
from collections.abc import Callable
from typing import Any

from mpicoll.rpc.service import Pool, Service, Task


class Messages:
    """A transport whose messages are the functions that they ask for."""

    def __init__(self) -> None:
        self.sent: list[Callable[[], None]] = []

    def arrived(self) -> list[Callable[[], None]]:
        came, self.sent = self.sent, []
        return came

    def moving(self) -> bool:
        return False


class LatePool(Pool):
    """The thread that has started a function goes on only after the function is in its first call."""

    def __init__(self, inside: threading.Event) -> None:
        super().__init__(kept=4)
        self._inside = inside

    def submit_now(self, run: Callable[[], object]) -> bool:
        done = super().submit_now(run)
        if threading.current_thread().name == "mpicoll rpc standby":
            self._inside.wait(5)
        return done


def test_a_server_that_is_busy_at_once_is_replaced() -> None:
    """Its first call waits for a later one, and so does that of the server before it."""
    transport, inside, go = Messages(), threading.Event(), threading.Event()
    pool = LatePool(inside)
    made: Any = lambda run: Task(run, is_quick=False)  # noqa: E731
    service = Service(transport, pool, made, lambda: None, lambda: False)  # type: ignore[arg-type]

    def second() -> None:
        inside.set()
        go.wait(20)

    def first() -> None:
        transport.sent.append(second)
        go.wait(20)

    service.start()
    transport.sent.append(first)
    assert inside.wait(10)
    begin = time.monotonic()
    transport.sent.append(go.set)
    assert go.wait(10), "no thread serves"
    assert time.monotonic() - begin < 5
    service.stop()
    pool.close()
