"""A script that has never heard of mpicoll: data-parallel training with the mpi backend, or over gloo, which meets by MPI.

train_ddp.py [gloo]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> DistributedDataParallel:
    if sys.argv[1:] == ["gloo"]:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)  # nothing but MPI says where to meet
        dist.init_process_group("gloo", init_method="mpi://")
    else:
        dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
    x = torch.randn(64, 4)
    y = x.sum(1, keepdim=True)
    mine = slice(rank * 64 // size, (rank + 1) * 64 // size)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    checksums = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(checksums, sum(p.detach().sum() for p in model.parameters()).reshape(1))
    assert all(torch.equal(c, checksums[0]) for c in checksums), checksums
    assert losses[-1] < losses[0] / 5, losses
    backend = dist.get_backend()
    dist.destroy_process_group()
    print(f"rank {rank} of {size}: trained with {backend}", flush=True)
    return parallel


if __name__ == "__main__":
    # The last reference to Gloo's group, dropped right after a collective, now and then has no end (5 of 36 jobs): torch holds
    # Python's lock while it joins Gloo's thread, which waits for the lock to drop a tensor.
    kept = main()
