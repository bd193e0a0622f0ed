"""A gloo subgroup beside the mpi world, then a second life of the world, then an end without destroy_process_group."""

import torch
import torch.distributed as dist

for life in range(3):
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = dist.new_group(backend="gloo")
    half = dist.new_group(list(range((size + 1) // 2)))
    one = torch.ones(1)
    dist.all_reduce(one)
    dist.all_reduce(one, group=gloo)
    assert one.item() == size * size, one
    if rank < (size + 1) // 2:
        dist.all_reduce(one, group=half)
    if life < 2:
        dist.destroy_process_group()
print(f"rank {rank} of {size}: three lives", flush=True)
