"""A script written for torchrun: everything comes from the environment."""

import os

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

dist.init_process_group(backend="mpi", init_method="env://", rank=rank, world_size=size)
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
assert 0 <= local_rank < local_size <= size
assert dist.get_node_local_rank() == local_rank
total = torch.tensor([float(rank)])
dist.all_reduce(total)
assert total.item() == size * (size - 1) / 2

# the address is good for a store of the program's own
store = dist.TCPStore(address, port, size, rank == 0)
store.add("here", 1)
dist.barrier()
assert store.add("here", 0) == size
dist.barrier()
dist.destroy_process_group()
print(f"rank {rank} of {size}: local {local_rank} of {local_size}", flush=True)
