"""Training over Gloo in a job of mpirun: init_method="mpi://" takes rank, size and store from MPI."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)  # nothing but MPI says where to meet
dist.init_process_group("gloo", init_method="mpi://")
assert dist.get_backend() == "gloo"
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
parallel = DistributedDataParallel(model)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
x = torch.randn(8 * dist.get_world_size(), 4)
mine = x.chunk(dist.get_world_size())[dist.get_rank()]
for _ in range(20):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(parallel(mine), mine.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
checksums = [torch.zeros(1) for _ in range(dist.get_world_size())]
dist.all_gather(checksums, sum(p.detach().sum() for p in model.parameters()).reshape(1))
assert all(torch.equal(c, checksums[0]) for c in checksums), checksums
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: trained to {loss.item():.2f}\n")
sys.stdout.flush()
dist.destroy_process_group()
