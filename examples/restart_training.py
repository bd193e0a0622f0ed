# python -m mpicoll.run -n 2 examples/restart_training.py
"""Training that goes on after the loss of a rank: distributed checkpoints, and `mpicoll.run --max-restarts`.

    python -m mpicoll.run -n 2 --max-restarts 2 examples/restart_training.py --checkpoints FOLDER --kills 2

    [1] an attempt begins with the last checkpoint in the folder, or from the start
    [2] all ranks save together, by torch.distributed.checkpoint; a folder gets its name when it is complete
    [3] with `--kills K`, a rank that is drawn at random is killed at a random step of the first K attempts

Any number of ranks. A test trains without a checkpoint, too: the weights are the same to the last bit.
"""

import argparse
import os
import random
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist

STEPS, SAVE_EVERY, BATCH = 24, 4, 32
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # set by mpicoll.run --max-restarts


def train(folder: Path | None, fatal_step: int = -1, victim: int = -1) -> nn.Module:
    """The trained model (collective); with ``folder``: from its last checkpoint on. ``victim`` dies at ``fatal_step``."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = load(folder, model, optimizer) if folder else 0
    for step in range(first, STEPS):
        if step == fatal_step and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)  # [3]
        samples = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(samples), samples.sum(1, keepdim=True).sin()).backward()
        optimizer.step()
        if folder and (step + 1) % SAVE_EVERY == 0:
            save(folder, step + 1, model, optimizer)
    return model.module


def state(model: nn.Module, optimizer: torch.optim.SGD) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and momentum; the tensors are those of the model, so loading into them changes it."""
    momentum = {}
    for name, weight in model.named_parameters():
        slot = optimizer.state[weight]
        if slot.get("momentum_buffer") is None:  # before the first step
            slot["momentum_buffer"] = torch.zeros_like(weight)
        momentum[name] = slot["momentum_buffer"]
    return {"model": model.state_dict(), "momentum": momentum}


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.SGD) -> None:
    part = folder / "part"
    checkpoint.save(state(model, optimizer), checkpoint_id=part)  # [2] collective
    if dist.get_rank() == 0:
        part.rename(folder / f"step-{step}")
    dist.barrier()


def saved_steps(folder: Path) -> int:
    """The number of steps that the last checkpoint has; 0: there is none."""
    return max((int(path.name.removeprefix("step-")) for path in folder.glob("step-*")), default=0)


def load(folder: Path, model: nn.Module, optimizer: torch.optim.SGD) -> int:
    """Loads the last checkpoint, if there is one. Returns the number of steps that it has."""
    steps = saved_steps(folder)
    if steps:
        checkpoint.load(state(model, optimizer), checkpoint_id=folder / f"step-{steps}")  # [1] collective
    return steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", type=Path, help="a folder that all ranks see; default: a temporary one")
    parser.add_argument("--kills", type=int, default=0, help="kill a rank in so many attempts")
    options = parser.parse_args()
    if options.kills and not options.checkpoints:
        parser.error("--kills needs --checkpoints: the next attempt must find them")

    dist.init_process_group()
    folder = options.checkpoints or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    fatal_step = random.randrange(saved_steps(folder), STEPS) if options.kills > ATTEMPT else -1
    plan = [folder, fatal_step, random.randrange(dist.get_world_size())]
    dist.broadcast_object_list(plan)  # those of rank 0
    train(*plan)
    if dist.get_rank() == 0:
        print(f"restart_training: {STEPS} steps in {ATTEMPT + 1} attempt(s)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
