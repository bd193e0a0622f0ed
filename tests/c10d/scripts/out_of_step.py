"""Ranks call different collectives; with TORCH_DISTRIBUTED_DEBUG=DETAIL torch notices before anybody waits."""

import torch
import torch.distributed as dist

dist.init_process_group("mpi")
one = torch.ones(2)
dist.all_reduce(one)
assert one[0] == dist.get_world_size()
try:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(3), 1)
except RuntimeError as error:
    word = "mismatch" if "Detected mismatch" in str(error) else str(error)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {word}", flush=True)
dist.destroy_process_group()
