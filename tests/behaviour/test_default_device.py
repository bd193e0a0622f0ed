"""torch.set_default_device is for the program's tensors: what mpicoll makes for itself is where MPI, or the CPU, must find it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

import mpicoll as dist
from tests.behaviour import random_operations
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")


def test_random_operations(seed: int) -> None:
    """Collectives, messages and objects, in all dtypes and layouts."""
    with torch.device("meta"):
        random_operations.run(seed, 500)
    agree(True)


def test_a_sparse_tensor_and_a_monitored_barrier(rank: int, size: int) -> None:
    ones, places = torch.ones(1), torch.tensor([[rank]])
    with torch.device("meta"):
        sparse = torch.sparse_coo_tensor(places, ones, (size,), device="cpu", check_invariants=False)
        dist.all_reduce(sparse)
        dist.monitored_barrier(timeout=timedelta(seconds=10))
    agree(bool(sparse.to_dense().eq(1).all()))
