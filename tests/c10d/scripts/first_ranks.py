"""python some_ranks.py CASE PLACE on 4 ranks (tutorial, fails, nowhere) or 3: worlds of some of MPI's ranks.

PLACE: a port, or a folder for `again`.
"""

import datetime
import importlib
import os
import sys
import warnings
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


def tutorial(place: str) -> None:
    """DDP on ranks 0 and 1, RPC over all four: as in PyTorch's tutorial that combines them."""
    import torch.distributed as dist

    rpc = importlib.import_module("mpicoll.rpc")
    if RANK < 2:
        dist.init_process_group("mpi", rank=RANK, world_size=2, init_method=f"tcp://localhost:{place}")
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


def rpc_first(place: str) -> None:
    """RPC over all ranks is there before, and after."""
    import mpicoll as dist

    rpc = importlib.import_module("mpicoll.rpc")
    rpc.init_rpc(f"worker{RANK}")
    for i in range(2):
        if RANK < 2:
            dist.init_process_group(rank=RANK, world_size=2, init_method=f"tcp://localhost:{int(place) + i}")
            assert summed(dist) == 1
            dist.destroy_process_group()
    if RANK == 2:
        assert rpc.rpc_sync("worker0", abs, (-3,)) == 3
    rpc.shutdown()


def again(place: str) -> None:
    """Ranks 2 and 1, in this order, twice; rank 0 starts MPI and does not know of mpicoll. Then a world of all."""
    import mpicoll as dist

    if RANK == 0:
        from mpi4py import MPI  # noqa: F401
    else:
        for i in range(2):
            dist.init_process_group(rank=2 - RANK, world_size=2, init_method=f"file://{place}/{i}")
            assert (dist.get_rank(), summed(dist)) == (2 - RANK, 3)
            dist.broadcast(tensor := torch.tensor([float(RANK)]), src=0)
            assert tensor.item() == 2
            dist.destroy_process_group()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.init_process_group()
    assert summed(dist) == 3


def store(place: str) -> None:
    """One store of the program's own, one world after another on it, of other ranks each time."""
    import torch.distributed as dist

    importlib.import_module("mpicoll._mpi.library")  # starts MPI, which all ranks do together
    shared = dist.TCPStore("localhost", int(place), is_master=RANK == 0, wait_for_workers=False)
    for members in ([0, 1], [2, 1], [1]):
        if RANK in members:
            dist.init_process_group("mpi", rank=members.index(RANK), world_size=len(members), store=dist.PrefixStore("x", shared))
            assert summed(dist) == sum(members)
            dist.destroy_process_group()
        shared.add(f"done {members}", 1)
        while shared.add(f"done {members}", 0) < 3:
            pass
    shared.add("end", 1)
    while RANK == 0 and shared.add("end", 0) < 3:
        pass


def nowhere(place: str) -> None:
    import torch.distributed as dist

    for more in ({}, {"init_method": "env://"}, {"init_method": "mpi://"}):
        try:
            dist.init_process_group("mpi", rank=RANK % 2, world_size=2, **more)
        except RuntimeError as error:
            said = str(error)
        else:
            said = "not refused"
        assert "name a place where these can meet" in said, (more, said)
    if RANK < 2:
        method = f"tcp://localhost:{place}?rank=0&world_size=2"  # both come as rank 0
        try:
            dist.init_process_group("mpi", init_method=method, timeout=datetime.timedelta(seconds=5))
        except Exception as error:  # noqa: BLE001  torch's, if it is the address that is in use
            print(type(error).__name__, flush=True)
        else:
            raise AssertionError("two ranks 0")
        assert not dist.is_initialized()
    dist.init_process_group("mpi")
    assert summed(dist) == 6


def fails(place: str) -> None:
    """A member raises; the other one waits for it, and the others for remote calls."""
    import torch.distributed as dist

    rpc = importlib.import_module("mpicoll.rpc")
    if RANK < 2:
        dist.init_process_group("mpi", rank=RANK, world_size=2, init_method=f"tcp://localhost:{place}")
    rpc.init_rpc(f"worker{RANK}")
    if RANK == 1:
        raise ZeroDivisionError("on purpose")
    if RANK == 0:
        summed(dist)
    rpc.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
    print(f"rank {RANK} is well", flush=True)
