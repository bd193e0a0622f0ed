# python -m mpicoll.run -n 2 examples/basics/ddp_minimal.py
"""DistributedDataParallel: learns y = 2x + 1, each rank from points of its own.

DDP gives all ranks the weights of rank 0 at the start, and averages the gradients in `backward`. So the weights stay equal.
"""

import torch
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()

torch.manual_seed(rank)  # other points on each rank
x = torch.rand(100, 1)
y = 2 * x + 1

model = DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(500):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()

weight, bias = model.module.weight.item(), model.module.bias.item()
print(f"rank {rank}: y = {weight:.2f} x + {bias:.2f}")
dist.destroy_process_group()
