"""The last rank raises; the others wait for it in a collective that it never reaches."""

import torch
import torch.distributed as dist

for _ in range(2):
    dist.init_process_group("mpi")
    if _ == 0:
        dist.destroy_process_group()
if dist.get_rank() == dist.get_world_size() - 1:
    raise ValueError("this rank has had enough")
dist.all_reduce(torch.ones(1))
