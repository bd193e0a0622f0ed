"""The plugin that makes one pytest run out of N (tests/support/spmd.py)."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.spmd import Side


def test_after_an_interrupt_a_rank_exchanges_nothing_more() -> None:
    """The messages of the next exchange would meet those of the one that was left: the job ended in MPI_ERR_TRUNCATE."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    side: Any = Side.__new__(Side)
    side.rank, side.size, side.waits_at, side.comm = 1, 2, "", SimpleNamespace(Iallgather=interrupted)
    with pytest.raises(KeyboardInterrupt):
        side.exchange("a test", None)
    with pytest.raises(TimeoutError, match="rank 1 of 2 was interrupted at: a test"):
        side.exchange("end of session", 0)
