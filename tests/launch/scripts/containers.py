"""Collectives and messages of small and large size; prints "right" on rank 0. See ../test_containers.py."""

import torch
import torch.distributed as dist

dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
for count in (2, 1 << 18, 1 << 21):
    x = torch.full((count,), float(rank))
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((count,), size * (size - 1) / 2))
    gathered = [torch.empty(count) for _ in range(size)]
    dist.all_gather(gathered, torch.full((count,), float(rank)))
    assert all(torch.equal(part, torch.full((count,), float(r))) for r, part in enumerate(gathered))
    if rank == 0:
        dist.send(torch.arange(count), size - 1)
    elif rank == size - 1:
        received = torch.empty(count, dtype=torch.int64)
        dist.recv(received, 0)
        assert torch.equal(received, torch.arange(count))
dist.barrier()
if rank == 0:
    print("right")
dist.destroy_process_group()
