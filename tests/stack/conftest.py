"""Every test here runs in a world that an unmodified torch script would have: init_process_group("mpi")."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def mpi_world(_end_of_world: None) -> None:
    """The default group is MPI's, made through torch's own function."""
    if not dist.is_initialized():
        dist.init_process_group("mpi")
