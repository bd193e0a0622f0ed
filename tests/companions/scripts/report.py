"""What the programs of this folder have in common: the same small problem, and one line of JSON from each rank."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn

SAMPLES, STEPS, RATE = 32, 4, 0.1


def problem() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model of few parameters, its inputs and targets; equal on all ranks and in all runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(SAMPLES, 4)
    return model, x, x.sum(1, keepdim=True)


def share(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the samples."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def report(losses: list[float], weights: nn.Module | list[torch.Tensor], **more: object) -> None:
    """Prints losses and weights, and the backend of the default group."""
    parameters = weights.parameters() if isinstance(weights, nn.Module) else weights
    line = {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "losses": losses,
        "weights": torch.cat([p.detach().float().flatten() for p in parameters]).tolist(),
        **more,
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
