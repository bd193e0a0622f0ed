"""Functional collectives for which nobody waits: dropped at once, under way when their group goes, and at the end.

mpirun -n 2 python tests/c10d/scripts/unwaited.py destroy
"""

import gc
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
world = dist.group.WORLD
gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)

# Neither the result nor the input is kept: their memory must live until MPI is through with it.
for turn in range(30):
    funcol.all_reduce(torch.full((50_000,), float(rank)), "sum", world)
    gather(torch.full((20_000,), float(rank)), 0, world)
    if turn % 10 == 0:
        gc.collect()
assert funcol.all_reduce(torch.ones(3), "sum", world).tolist() == [size] * 3

group = dist.new_group()
late = funcol.all_reduce(torch.ones(3), "sum", group)
funcol.all_reduce(torch.ones(1000), "sum", group)
dist.destroy_process_group(group)
assert late.tolist() == [size] * 3

kept = [funcol.all_reduce(torch.ones(100_000), "sum", world) for _ in range(5)]
for _ in range(5):
    funcol.broadcast(torch.ones(10), 0, world)
print("through", flush=True)
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
