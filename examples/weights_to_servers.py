# python -m mpicoll.run -n 4 examples/weights_to_servers.py
"""A trainer sends its weights to servers every 50 steps. Each of the two is a world of its own, and a group spans them.

    trainer   rank 0  <-- all_reduce -->  rank 1
                |
                +-- broadcast -->  servers 0 and 1

    [1] half of the ranks are the trainer's. Two programs can be started in one job, too: -n 2 trainer.py : -n 2 server.py
    [2] the default group of each
    [3] `new_group(comm=...)`: the first rank of the trainer, and all servers
    [4] the rank in ``comm`` is the rank in this group: 0 is the trainer

The trainer fits y = 3x + 1. A server works with the last weights that it has got. Any number of ranks from 2.
"""

import sys

import torch
from mpi4py import MPI

import mpicoll as dist

STEPS, EVERY = 200, 50


def send_weights(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Copies the trainer's weights to all members (collective over the group)."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0, group=group)  # [4]


def train(model: torch.nn.Module, group: dist.ProcessGroup | int) -> None:
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(1, STEPS + 1):
        x = torch.rand(64, 1)
        optimizer.zero_grad()
        (model(x) - (3 * x + 1)).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        if step % EVERY == 0 and isinstance(group, dist.ProcessGroup):
            send_weights(model, group)


def serve(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    errors = []
    for _ in range(STEPS // EVERY):
        send_weights(model, group)
        errors.append((model(torch.tensor([0.5])) - 2.5).abs())
    worst = torch.cat(errors).detach()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        steps = [f"{error:.3f} after {EVERY * (number + 1)} steps" for number, error in enumerate(worst)]
        print(f"weights_to_servers: {dist.get_world_size()} server(s), error {', '.join(steps)}")


def main() -> None:
    job = MPI.COMM_WORLD
    if job.Get_size() < 2:
        sys.exit("weights_to_servers: at least 2 ranks are needed, a trainer and a server")
    serves = job.Get_rank() >= job.Get_size() // 2  # [1]
    own = job.Split(color=serves)
    assert isinstance(own, MPI.Intracomm)
    dist.init_process_group(comm=own)  # [2]
    both = job.Split(0 if serves or dist.get_rank() == 0 else MPI.UNDEFINED)
    assert isinstance(both, MPI.Intracomm)
    group = dist.new_group(comm=both)  # [3]

    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(1, 1)
    if serves:
        serve(model, group)
    else:
        train(model, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
