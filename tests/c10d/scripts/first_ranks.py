"""python first_ranks.py CASE PORT on 4 ranks (tutorial, fails) or 3: worlds of MPI's first ranks."""

import importlib
import os
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

RANK = int(os.environ["RANK"])  # as mpicoll has set it


def summed(dist: Any, group: Any = None) -> float:
    dist.all_reduce(tensor := torch.tensor([float(RANK)]), group=group)
    return tensor.item()


def step() -> float:
    """One step of DDP on this trainer; called by remote."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    model(torch.full((1, 2), float(dist.get_rank() + 1))).sum().backward()
    return next(model.parameters()).grad.mean().item()


def tutorial(port: str) -> None:
    """DDP on ranks 0 and 1, RPC over all four: as in PyTorch's tutorial that combines them."""
    import torch.distributed as dist

    rpc = importlib.import_module("mpicoll.rpc")
    if RANK < 2:
        dist.init_process_group("mpi", rank=RANK, world_size=2, init_method=f"tcp://localhost:{port}")
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (RANK, 2, "mpi")
        assert summed(dist) == 1
    rpc.init_rpc(["trainer0", "trainer1", "master", "ps"][RANK], rank=RANK, world_size=4)
    if RANK == 2:
        steps = [rpc.rpc_async(f"trainer{i}", step) for i in range(2)]
        assert [one.wait() for one in steps] == [1.5, 1.5]
        assert rpc.rpc_sync("ps", torch.add, (torch.ones(1), 1)).item() == 2
    rpc.shutdown()
    if RANK < 2:
        group = dist.new_group([1])
        if RANK == 1:
            assert summed(dist, group) == 1
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()


def rpc_first(port: str) -> None:
    """RPC over all ranks is there before, and after. Then a world of all."""
    import mpicoll as dist

    rpc = importlib.import_module("mpicoll.rpc")
    rpc.init_rpc(f"worker{RANK}")
    for i in range(2):
        if RANK < 2:
            dist.init_process_group(rank=RANK, world_size=2, init_method=f"tcp://localhost:{int(port) + i}")
            assert summed(dist) == 1
            dist.destroy_process_group()
    if RANK == 2:
        assert rpc.rpc_sync("worker0", abs, (-3,)) == 3
    rpc.shutdown()
    dist.init_process_group()
    assert summed(dist) == 3


def fails(port: str) -> None:
    """A member raises; the other one waits for it, and the others for remote calls."""
    import torch.distributed as dist

    rpc = importlib.import_module("mpicoll.rpc")
    if RANK < 2:
        dist.init_process_group("mpi", rank=RANK, world_size=2, init_method=f"tcp://localhost:{port}")
    rpc.init_rpc(f"worker{RANK}")
    if RANK == 1:
        raise ZeroDivisionError("on purpose")
    if RANK == 0:
        summed(dist)
    rpc.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
    print(f"rank {RANK} is well", flush=True)
