"""How a channel waits for its messages."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll._mpi.channel import Channel


class Request:
    """A request that has ended at the third test."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Wait(self, status: Any) -> None:
        self.calls.append("Wait")

    def Test(self, status: Any) -> bool:
        self.calls.append("Test")
        return len(self.calls) == 3


@pytest.mark.parametrize(
    ("serialized", "large", "in_background", "calls"),
    [
        (False, False, False, ["Wait"]),
        (False, True, False, ["Test"] * 3),
        (False, True, True, ["Wait"]),  # the thread that computes may hold the interpreter
        (True, False, False, ["Test"] * 3),
        (True, True, True, ["Test"] * 3),  # MPI_Wait would keep every other thread out of MPI
    ],
)
def test_who_tests_and_who_waits(serialized: bool, large: bool, in_background: bool, calls: list[str], world: Any) -> None:
    from mpicoll._api import groups

    known = groups.of(None)
    assert known is not None
    channel = object.__new__(Channel)
    channel.runtime, channel.lock = SimpleNamespace(serialized=serialized), known.channel.lock
    channel.test = lambda request, status: request.Test(status)
    channel.in_background = lambda: in_background
    request = Request()
    channel.wait_all([request], large=large)
    assert request.calls == calls
