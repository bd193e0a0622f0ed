"""DistributedSampler: every rank its share, by MPI's rank and size."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.support import agree, everyone

SECTION = "State"


@pytest.mark.feature("DistributedSampler")
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_the_samples_out(shuffle: bool, rank: int, size: int) -> None:
    """Each epoch every sample is on exactly one rank, but for the padding that makes the shares equal."""
    samples = TensorDataset(torch.arange(10))
    sampler: DistributedSampler[int] = DistributedSampler(samples, shuffle=shuffle, seed=3)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append([int(x) for (batch,) in DataLoader(samples, batch_size=2, sampler=sampler) for x in batch])
    shares = everyone(epochs)
    for epoch in range(2):
        seen = [x for share in shares for x in share[epoch]]
        agree(set(seen) == set(range(10)) and len(seen) == -(-10 // size) * size, seen)
    agree((epochs[0] != epochs[1]) == shuffle, epochs)
