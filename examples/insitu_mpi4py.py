# python -m mpicoll.run -n 4 examples/insitu_mpi4py.py
"""A simulation in mpi4py on some ranks, and a network on the others that learns from it while it runs.

    MPI.COMM_WORLD     rank 0        rank 1        rank 2         rank 3
                      simulates     simulates      trains         trains
                      a strip  <-->  a strip        DDP   <------>  DDP
                        |  halo        |             ^              ^
                        |              |             |  snapshots   |
                        +--------------+-------------+--------------+

    [1] Split makes two communicators. The ranks that simulate need no torch.distributed
    [2] `init_process_group(comm=...)`: the ranks that train are the world of torch, with ranks of its own
    [3] each snapshot goes to one of the ranks that train, strip by strip, by mpi4py's Send and Recv on COMM_WORLD
    [4] `get_comm()`: an mpi4py communicator of a group, for what torch.distributed has not (here MAXLOC)
    [5] what was learned goes back to the simulation

The simulation diffuses heat on a ring: u[i] += 0.2 (u[i-1] - 2 u[i] + u[i+1]). So the convolution learns 0.2, 0.6, 0.2. Any
number of ranks from 2; half of them simulate.

    python -m mpicoll.run -n 4 examples/insitu_mpi4py.py --plot learned.png      a snapshot and the weights; needs matplotlib
"""

import argparse
import sys
from itertools import pairwise

import numpy as np
import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist

POINTS, RATE = 240, 0.2
SNAPSHOTS_EACH = 80  # for each rank that trains
world = MPI.COMM_WORLD


def strips(size: int) -> list[int]:
    """Where the strips of ``size`` ranks begin, and the end of the last one."""
    return [POINTS * rank // size for rank in range(size + 1)]


def step(u: np.ndarray, comm: MPI.Intracomm) -> np.ndarray:
    """The temperatures of this rank's strip, one time step later (collective)."""
    rank, size = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % size, (rank + 1) % size
    padded = np.concatenate([[0.0], u, [0.0]])
    comm.Sendrecv(u[-1:], right, recvbuf=padded[:1], source=left)
    comm.Sendrecv(u[:1], left, recvbuf=padded[-1:], source=right)
    return u + RATE * (padded[:-2] - 2 * u + padded[2:])


def simulate(comm: MPI.Intracomm, trainers: int) -> None:
    """Simulates; sends a snapshot, before and after a step, to the ranks that train in turn; tries what they have learned."""
    rank, size = comm.Get_rank(), comm.Get_size()
    count = np.diff(strips(size))[rank]
    random = np.random.default_rng(rank)
    u = random.standard_normal(count)
    for number in range(SNAPSHOTS_EACH * trainers):
        u += 0.5 * random.standard_normal(count)  # sources of heat, which flicker
        before, u = u, step(u, comm)
        world.Send(np.stack([before, u]), dest=size + number % trainers)  # [3]
    weights = np.empty(3)
    world.Bcast(weights, root=size)  # [5]
    after = step(u, comm)
    inside = np.convolve(u, weights, mode="valid")  # the points that have both neighbours in this strip
    error = comm.allreduce(np.abs(inside - after[1:-1]).max(), MPI.MAX)
    if rank == 0:
        print(f"insitu_mpi4py: the simulation got the network, and agrees with it to {error:.0e}")


def received(simulators: int) -> torch.Tensor:
    """The next snapshot for this rank, as (before and after, points)."""
    snapshot, starts = np.empty((2, POINTS)), strips(simulators)
    for source, (start, end) in enumerate(pairwise(starts)):
        strip = np.empty((2, end - start))
        world.Recv(strip, source=source)
        snapshot[:, start:end] = strip
    return torch.from_numpy(snapshot)


def plot(path: str, snapshot: torch.Tensor, borders: list[int], weights: torch.Tensor) -> None:
    """Draws the last snapshot that the first rank that trains has received, and the weights after each of its steps."""
    from matplotlib.figure import Figure

    above, below = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots(2, 1)
    above.plot(snapshot[0], label="before", linewidth=0.8)
    above.plot(snapshot[1], label="a step later")
    for border in borders[1:-1]:
        above.axvline(border - 0.5, color="black", linewidth=0.8)
    above.set(title="A snapshot, put together from the strips", xlabel="point on the ring", ylabel="temperature")
    for rate in (RATE, 1 - 2 * RATE):
        below.axhline(rate, color="black", linewidth=0.8, linestyle="--")
    below.plot(weights, label=["left", "middle", "right"])
    below.set(title="The weights of the network, and the truth", xlabel="snapshots seen by each rank that trains")
    above.legend(loc="upper right")
    below.legend(loc="center right")
    figure.savefig(path, dpi=100)


def train(comm: MPI.Intracomm, simulators: int, picture: str | None) -> None:
    dist.init_process_group(comm=comm)  # [2]
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    convolution = torch.nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular", bias=False, dtype=torch.float64)
    model = DistributedDataParallel(convolution)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    error, history, snapshot = 0.0, [], torch.empty(0)
    for _ in range(SNAPSHOTS_EACH):
        snapshot = received(simulators)  # while this rank trains, the simulation goes on
        difference = model(snapshot[0].view(1, 1, -1)) - snapshot[1]
        optimizer.zero_grad()
        difference.square().mean().backward()
        optimizer.step()
        error = difference.abs().max().item()
        history.append(convolution.weight.detach().flatten().clone())

    worst, where = dist.get_comm().allreduce((error, rank), MPI.MAXLOC)  # [4]
    weights = history[-1]
    if rank == 0:
        if picture is not None:
            plot(picture, snapshot, strips(simulators), torch.stack(history))
        print(f"{simulators} ranks simulate {POINTS} points, {size} ranks train on {SNAPSHOTS_EACH * size} snapshots")
        learned = ", ".join(f"{weight:.2f}" for weight in weights)
        print(f"the network has learned {learned}; largest error {worst:.0e} on rank {where}")
    world.Bcast(weights.numpy(), root=simulators)  # [5]
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot", metavar="PNG", help="draw what was learned here")
    options = parser.parse_args()
    rank, size = world.Get_rank(), world.Get_size()
    if size < 2:
        sys.exit("insitu_mpi4py: at least 2 ranks are needed, one to simulate and one to train")
    simulators = size // 2
    comm = world.Split(color=int(rank >= simulators), key=rank)  # [1]
    assert isinstance(comm, MPI.Intracomm)
    if rank < simulators:
        simulate(comm, trainers=size - simulators)
    else:
        train(comm, simulators, options.plot)
    comm.Free()


if __name__ == "__main__":
    main()
