"""A program of mpi4py that also trains by torch. Arguments: the backend; for torchrun also "alone", without mpi4py."""

import sys

import torch
import torch.distributed as dist
from report import RATE, STEPS, problem, report, share
from torch.nn.parallel import DistributedDataParallel


def main(backend: str, alone: bool) -> None:
    world = None
    if not alone:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = problem()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    losses, pending = [], None
    for step in range(STEPS):
        if world:  # a ring of messages on COMM_WORLD that stays pending while DDP reduces its gradients
            pending = world.isend((rank, step), (rank + 1) % size, tag=step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(parallel(share(x)), share(y))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if world:
            assert world.recv(source=(rank - 1) % size, tag=step) == ((rank - 1) % size, step)
            pending.wait()
            losses.append(world.allreduce(mean.item()) / size)
        else:
            dist.all_reduce(mean)
            losses.append(mean.item() / size)
    report(losses, model)
    dist.destroy_process_group()
    if world:
        assert world.allgather(rank) == list(range(size))  # MPI goes on after the group has ended


if __name__ == "__main__":
    main(sys.argv[1], "alone" in sys.argv)
