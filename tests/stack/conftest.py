"""Every test here runs in a world that an unmodified torch script would have: init_process_group("mpi")."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


@pytest.fixture(autouse=True)
def mpi_world(_end_of_world: None) -> None:
    """The default group is MPI's, made through torch's own function."""
    if not dist.is_initialized():
        dist.init_process_group("mpi")


@pytest.fixture
def no_world(mpi_world: None) -> Iterator[None]:
    """For tests that make a world of another kind; the usual one is made again by the next test."""
    level = dist.get_debug_level()
    end_world()
    yield
    end_world()
    dist.set_debug_level(level)


def end_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # torch's plans for a mesh name the groups of the world in which they were made
