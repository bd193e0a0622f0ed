"""Several calls at once: torch.futures.wait_all and collect_all end at the first error, as with torch's own RPC (trap 85)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.futures import Future

from mpicoll import rpc
from tests.rpc.test_calls import add, fail
from tests.support import agree

_released = threading.Event()


def wait_until_released() -> bool:
    return _released.wait(30)


@pytest.mark.parametrize("collect", ["wait_all", "collect_all"])
def test_the_first_error_ends_the_wait(collect: str, right: str) -> None:
    """Of a call that is behind one that has not ended; of its own type, with the text from there."""
    _released.clear()
    agree(True)  # everybody has cleared it before anybody calls
    began = time.monotonic()
    futures = [rpc.rpc_async(right, wait_until_released), rpc.rpc_async(right, fail, (ValueError,))]
    with pytest.raises(ValueError, match="for a reason"):
        torch.futures.wait_all(futures) if collect == "wait_all" else torch.futures.collect_all(futures).wait()
    took, left = time.monotonic() - began, not futures[0].done()
    agree(took < 20 and left, (took, left))
    _released.set()
    agree(futures[0].wait())


def test_of_calls_and_other_futures(right: str) -> None:
    """Answers in the order of the futures; callbacks of the whole; none at all; futures of other kinds among them or alone."""
    other: Future[Any] = Future()
    futures: list[Any] = [rpc.rpc_async(right, add, (i, 1)) for i in range(5)]
    chained = torch.futures.collect_all([*futures, other]).then(lambda whole: [f.wait() for f in whole.value()])
    other.set_result(9)
    found = [chained.wait(), torch.futures.wait_all([*futures, other]), torch.futures.wait_all([other])]
    agree(found == [[1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 9], [9]] and torch.futures.wait_all([]) == [], found)


def test_an_error_outside(right: str) -> None:
    """Two errors: the first is raised, and nothing is left that a later wait would hang on."""
    futures = [rpc.rpc_async(right, fail, (KeyError,)) for _ in range(3)]
    for _ in range(2):
        with pytest.raises(KeyError, match="for a reason"):
            torch.futures.wait_all(futures)
    agree(rpc.rpc_sync(right, add, (1, 1)) == 2)
