"""Each test is an RPC world of its own: every rank a worker, "worker0", "worker1" ..."""

from collections.abc import Iterator

import pytest

from mpicoll import rpc
from tests.support import everyone


@pytest.fixture
def workers(rank: int, size: int) -> Iterator[list[str]]:
    """Their names. At the end of the test, when all ranks have come, RPC is shut down."""
    rpc.init_rpc(f"worker{rank}")
    yield [f"worker{r}" for r in range(size)]
    everyone(None)
    rpc.shutdown()


@pytest.fixture
def right(rank: int, size: int, workers: list[str]) -> str:
    """The next worker; on one rank, itself."""
    return workers[(rank + 1) % size]
