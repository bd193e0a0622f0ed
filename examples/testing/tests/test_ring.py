"""pytest --ranks 1,2,3"""

import pytest
from mpi4py import MPI
from ring import ring_sum, save

from mpicoll.testing import agree, only_on, raises_everywhere


def test_sum(comm: MPI.Comm, rank: int, world_size: int) -> None:
    assert ring_sum(comm, rank + 1) == world_size * (world_size + 1) // 2


@pytest.mark.parametrize("value", [0, -1, 10**30])
def test_any_number(comm: MPI.Comm, value: int) -> None:
    agree(ring_sum(comm, value) == value * comm.size, value)


@pytest.mark.min_ranks(2)
def test_what_is_no_number_is_refused_on_all_ranks(comm: MPI.Comm) -> None:
    with raises_everywhere(TypeError, match="unsupported operand"):
        ring_sum(comm, None)  # type: ignore[arg-type]


def test_one_rank_writes(shared_path) -> None:
    assert only_on(0, save, shared_path / "text", "four") == 4
    assert (shared_path / "text").read_text() == "four"
