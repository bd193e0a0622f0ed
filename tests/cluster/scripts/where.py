"""An all_reduce; rank 0 prints where each rank ran, and what its variables said. With `leave`, task 1 of srun leaves early."""

import json
import os
import socket
import sys

if os.environ.get("SLURM_PROCID") == "1" and sys.argv[1:] == ["leave"]:
    sys.exit(3)  # before torch and MPI are there

import torch

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR")
before = {name: os.environ.get(name) for name in NAMES}

import mpicoll as dist  # noqa: E402

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.arange(1000.0) + rank
dist.all_reduce(tensor)
right = bool(torch.equal(tensor, torch.arange(1000.0) * size + sum(range(size))))
after = {name: os.environ.get(name) for name in NAMES}
ranks: list[object] = [None] * size
dist.all_gather_object(ranks, {"host": socket.gethostname(), "right": right, "before": before, "after": after})
if rank == 0:
    print("WHERE " + json.dumps(ranks), flush=True)
dist.destroy_process_group()
