"""How often the ranks wait for each other until they have a world.

On a busy machine each exchange takes until every rank has had the processor: 50 to 400 ms, and 4 ranks on 2 cores needed 14 of
them. An exchange of objects (`allgather`) is two collectives of MPI, of the sizes and of the contents; `Allgather` is one.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import mpicoll
from mpicoll._mpi import runtime
from mpicoll._mpi.library import MPI
from tests.support import agree, everyone

COLLECTIVES = {
    "allgather", "Allgather", "bcast", "allreduce", "gather", "scatter", "alltoall", "Dup", "Split", "Split_type", "Create_group",
}  # fmt: skip
counts: Counter[str] = Counter()


class Counted(MPI.Intracomm):
    """A communicator that counts the collectives on it, and on its duplicates."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in COLLECTIVES:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return found(*args, **kwargs)

        return call


@pytest.fixture
def counting() -> Iterator[Counter[str]]:
    """No world is open; one that is opened counts."""
    if mpicoll.is_initialized():
        mpicoll.destroy_process_group()
    mpicoll.init_process_group("mpi")  # makes the communicator of all ranks, once for each process
    mpicoll.destroy_process_group()
    plain = runtime.world_comm()
    assert plain is not None
    runtime.start().connect(Counted(plain))
    counts.clear()
    yield counts
    if mpicoll.is_initialized():
        mpicoll.destroy_process_group()
    runtime.start().connect(plain)
    runtime.stop()


def test_a_world_takes_four_exchanges(counting: Counter[str], size: int, pytestconfig: pytest.Config) -> None:
    """Hosts and thread levels, settings and nodes, and two for the boards in shared memory. With GPUs seven."""
    gpus = pytestconfig.getoption("--as-if-gpus") or torch.cuda.is_available()
    mpicoll.init_process_group("mpi")
    found = dict(counting)
    everyone("has it")
    agree(found == {"allgather": 2 + 3 * gpus, "Allgather": 2, "Dup": 1 + 2 * gpus, "Split_type": 1}, found)
    x = torch.ones(2)
    mpicoll.all_reduce(x)
    agree(x.tolist() == [size] * 2)


def test_a_group_takes_none_but_its_own(counting: Counter[str], rank: int, size: int) -> None:
    """Its members only wait for each other, and make its communicator."""
    mpicoll.init_process_group("mpi")
    counting.clear()
    mpicoll.new_group(list(range(size)))
    found = dict(counting)
    everyone("has it")
    agree(not found, found)
