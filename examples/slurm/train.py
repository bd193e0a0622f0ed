# python -m mpicoll.run -n 2 examples/slurm/train.py
"""Training that outlives the time limit of Slurm: `sbatch submit.sbatch` in this folder.

    [1] Slurm sends USR1 to the batch script before the time limit, and `mpicoll.run` passes it on to all ranks
    [2] the signal does not reach all ranks at the same step, so they agree on the step after which they stop
    [3] they save together, and end; the batch script puts the job back into the queue
    [4] the job starts again, and the ranks go on from the last checkpoint

A checkpoint gets its name when it is complete. The last job leaves the file `finished` beside the checkpoints. Any number of
ranks, also another one after a restart. For a rank that dies, see ../restart_training.py.
"""

import argparse
import signal
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist

BATCH = 64
asked = False  # whether Slurm has asked this rank to stop


def ask(number: int, frame: object) -> None:
    global asked
    asked = True  # [1]


def all_stop() -> bool:
    """Whether any rank has been asked (collective)."""
    flag = torch.tensor([float(asked)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)  # [2]
    return bool(flag.item())


def save(folder: Path, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    part = folder / "part"
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=part)  # [3]
    if dist.get_rank() == 0:
        part.rename(folder / f"step-{steps}")
    dist.barrier()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Loads the last checkpoint, if there is one. Returns the number of steps that it has (collective)."""
    steps = max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)
    if steps:
        weights, moments = get_state_dict(model, optimizer)
        checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{steps}")  # [4]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"), help="a folder that all ranks see")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--pause", type=float, default=0, help="seconds between steps, to try it out")
    options = parser.parse_args()
    signal.signal(signal.SIGUSR1, ask)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    options.checkpoints.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = load(options.checkpoints, model, optimizer)
    if rank == 0:
        print(f"{size} ranks begin after step {first}", flush=True)
    step, loss = first, torch.tensor(float("nan"))
    while step < options.steps:
        step += 1
        samples = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))[rank::size]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(samples), samples[:, :1].sin())
        loss.backward()
        optimizer.step()
        time.sleep(options.pause)
        if all_stop() or step == options.steps:
            save(options.checkpoints, step, model, optimizer)
            break
    if rank == 0:
        print(f"train: saved after step {step} of {options.steps}, loss {loss.item():.3f}", flush=True)
        if step == options.steps:
            (options.checkpoints / "finished").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
