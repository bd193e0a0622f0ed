# python -m mpicoll.run -n 4 --fault-tolerant examples/lost_rank.py
"""DistributedDataParallel that loses a rank in mid-epoch and goes on with the others (Open MPI 5).

Rank 1 kills itself at step 30. The other ranks get PeerLost, shrink the world, take the state of its first rank, share each
batch among fewer ranks, and finish. Each step uses the same points whatever the number of ranks, so that the result is that of
one process, to rounding. `--kill RANK@STEP` names other victims; with `--kill RANK@STEP+MS` one dies MS milliseconds later,
perhaps while the others shrink. The number of ranks must always divide the batch (120): 1, 2, 3, 4, 5, 6, 8 ...

A test runs it in float64 and in one process: the weights differ by at most 1e-9.
"""

import argparse
import itertools
import os
import signal
import threading

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpicoll as dist

EPOCHS, BATCH, SAMPLES = 8, 120, 1440
STEPS = SAMPLES // BATCH  # of an epoch


def dataset() -> TensorDataset:
    """Points in 16 dimensions, and which of 4 random directions each of them is nearest to."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLES, 16, generator=generator)
    directions = torch.randn(16, 4, generator=generator)
    return TensorDataset(points, (points @ directions).argmax(dim=1))


class Training:
    """What must be alike on all ranks: weights, the state of the optimizer, and the number of steps."""

    def __init__(self, former: "Training | None" = None) -> None:
        """Begins, or goes on from the state that ``former`` has on rank 0: a rank may have made one step more than another.

        Its parameters are new: those of ``former`` are still watched by its DistributedDataParallel.
        """
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.step = 0
        if former is not None:
            state = [(former.model.state_dict(), former.optimizer.state_dict(), former.step)]
            dist.broadcast_object_list(state)
            weights, moments, self.step = state[0]
            self.model.load_state_dict(weights)
            self.optimizer.load_state_dict(moments)

    def run(self, model: nn.Module, rank: int, size: int, die_at: dict[int, float]) -> None:
        """Makes the steps that are left, on the share of ``rank`` of ``size``."""
        data = dataset()
        sampler = DistributedSampler(data, num_replicas=size, rank=rank, seed=1)
        loader = DataLoader(data, batch_size=BATCH // size, sampler=sampler)
        for epoch in range(self.step // STEPS, EPOCHS):
            sampler.set_epoch(epoch)
            for points, labels in itertools.islice(loader, self.step % STEPS, None):
                if self.step in die_at:
                    threading.Timer(die_at.pop(self.step), os.kill, (os.getpid(), signal.SIGKILL)).start()
                self.optimizer.zero_grad()
                cross_entropy(model(points), labels).backward()
                self.optimizer.step()
                self.step += 1


def train(die_at: dict[int, float]) -> Training:
    """Trains on the ranks that are left (collective)."""
    training = Training()
    while True:
        try:
            training = Training(former=training)
            training.run(DistributedDataParallel(training.model), dist.get_rank(), dist.get_world_size(), die_at)
            dist.barrier()
            return training
        except dist.PeerLost as error:
            dist.shrink()
            if dist.get_rank() == 0:
                print(f"lost rank {error.ranks} at step {training.step}; on with {dist.get_world_size()} ranks", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="training that survives the loss of ranks")
    parser.add_argument("--kill", action="append", metavar="RANK@STEP[+MS]", help="default: 1@30")
    die_at: dict[int, float] = {}  # step -> seconds later
    for victim in parser.parse_args().kill or ["1@30"]:
        who, _, when = victim.partition("@")
        if int(who) == int(os.environ["RANK"]):
            step, _, later_ms = when.partition("+")
            die_at[int(step)] = int(later_ms or 0) / 1000

    dist.init_process_group()
    first_size = dist.get_world_size()
    training = train(die_at)
    if dist.get_rank() == 0:
        print(f"lost_rank: {training.step} steps, {first_size} ranks at first, {dist.get_world_size()} at last")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
