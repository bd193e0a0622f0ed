"""An all_reduce, also by Gloo over both stores; rank 0 prints where each rank ran, and what its variables said.

With `leave`, rank 1 leaves early.
"""

import json
import os
import socket
import sys

LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # the last one also counts daemons of an mpiexec
if sys.argv[1:] == ["leave"] and next(os.environ[name] for name in LAUNCHERS if name in os.environ) == "1":
    sys.exit(3)  # before torch and MPI are there

import torch  # noqa: E402

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")
before = {name: os.environ.get(name) for name in NAMES}

import mpicoll as dist  # noqa: E402

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.arange(1000.0) + rank
dist.all_reduce(tensor)
right = bool(torch.equal(tensor, torch.arange(1000.0) * size + sum(range(size))))


def by_gloo(group: object = None) -> bool:
    one = torch.ones(1)
    torch.distributed.all_reduce(one, group=group)
    return bool(one == size)


right &= by_gloo(dist.new_group(backend="gloo"))  # they meet over MPI
after = {name: os.environ.get(name) for name in NAMES}
ranks: list[object] = [None] * size
own = {"host": socket.gethostname(), "right": right, "before": before, "after": after, "threads": torch.get_num_threads()}
dist.all_gather_object(ranks, own)
if rank == 0:
    print("WHERE " + json.dumps(ranks), flush=True)
dist.destroy_process_group()
torch.distributed.init_process_group("gloo", init_method="mpi://")  # they meet over TCP
assert by_gloo()
torch.distributed.destroy_process_group()
