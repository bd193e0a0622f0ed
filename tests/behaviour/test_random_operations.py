"""2,000 random operations; 100,000 by the command in random_operations.py."""

from datetime import timedelta

import pytest
import torch

import mpicoll as dist
from tests.behaviour import random_operations
from tests.support import agree

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.timeout(120)]


def test_random_operations(seed: int) -> None:
    """All results are right; memory, descriptors and threads do not grow."""
    grown = random_operations.run(seed, 2000)
    agree(not grown, grown)


def test_with_a_default_device(seed: int, rank: int, size: int) -> None:
    """It is for the program's tensors: what mpicoll makes for itself is where MPI, or the CPU, must find it."""
    ones, places = torch.ones(1), torch.tensor([[rank]])
    with torch.device("meta"):
        random_operations.run(seed, 500)
        sparse = torch.sparse_coo_tensor(places, ones, (size,), device="cpu", check_invariants=False)
        dist.all_reduce(sparse)
        dist.monitored_barrier(timeout=timedelta(seconds=10))
    agree(bool(sparse.to_dense().eq(1).all()))
