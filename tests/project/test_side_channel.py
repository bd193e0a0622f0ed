"""The channel on which the ranks of a test session exchange reports (mpicoll/_mpi/side_channel.py)."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll._base.facts import ranks_in_words
from mpicoll._mpi.side_channel import SideChannel


def test_after_an_interrupt_a_rank_exchanges_nothing_more() -> None:
    """The messages of the next exchange would meet those of the one that was left: the job ended in MPI_ERR_TRUNCATE."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    side: Any = SideChannel.__new__(SideChannel)
    side.rank, side.size, side.waits_at, side.comm = 1, 2, "", SimpleNamespace(Iallgather=interrupted)
    with pytest.raises(KeyboardInterrupt):
        side.exchange("a test", None)
    with pytest.raises(TimeoutError, match="rank 1 of 2 was interrupted at: a test"):
        side.exchange("end of session", 0)


@pytest.mark.parametrize(
    ("ranks", "name"), [([1], "rank 1"), ([0, 1, 2], "ranks 0-2"), ([0, 2], "ranks 0, 2"), ([7, 3, 4], "ranks 3-4, 7")]
)
def test_ranks_are_named_by_spans(ranks: list[int], name: str) -> None:
    assert ranks_in_words(ranks) == name
