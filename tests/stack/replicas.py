"""What the tests of data parallel share: small networks, batches that all ranks know, and when replicas agree.

Every rank knows the whole batch of every step and takes its share; one process that trains on the whole batch is the
reference. Shares are equal, so that the mean of the ranks' means is the mean of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import everyone

ROWS = 4  # of each rank's share
WIDE, NARROW = 6, 3  # what networks take and give

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def network(seed: int = 7, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDE, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, NARROW)).to(dtype)


class Branches(nn.Module):
    """Ranks may go different ways: parameters without gradient, other ones on each rank, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.trunk = nn.Linear(WIDE, WIDE)
        self.branches = nn.ModuleList(nn.Linear(WIDE, NARROW) for _ in range(2))
        self.never = nn.Linear(WIDE, NARROW)
        self.double()

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.branches[way](torch.tanh(self.trunk(x)))  # type: ignore[no-any-return]


def batch(step: int, ranks: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: inputs and targets for ``ranks`` ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS * ranks, WIDE, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS * ranks, NARROW, generator=generator, dtype=torch.float64)
    return x.to(dtype), y.to(dtype)


def share(tensor: Tensor, rank: int) -> Tensor:
    return tensor[rank * ROWS : (rank + 1) * ROWS]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    steps: int,
    ranks: int,
    rank: int | None = None,
    optimizer: Optimizer | torch.optim.Optimizer = sgd,
    first: int = 0,
) -> nn.Module:
    """Trains on the steps' whole batches (rank None), or on a rank's share of them; returns the model."""
    stepper = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model.parameters())
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        x, y = batch(step, ranks, dtype)
        if rank is not None:
            x, y = share(x, rank), share(y, rank)
        stepper.zero_grad()
        loss_of(model(x), y).backward()
        stepper.step()
    return model


def close(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> bool:
    """Equal parameters, within an absolute tolerance."""
    return not apart(model, reference, tolerance)


def apart(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> list[Any]:
    """Names of parameters that are not equal, and by how much."""
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    far = [(name, float((p.detach() - q.detach()).abs().max())) for (name, p), q in pairs]
    return [(name, by) for name, by in far if not by <= tolerance]


def gradients_apart(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> list[Any]:
    """Names of parameters whose gradients are not equal: missing on one side only, or by how much."""
    wrong: list[Any] = []
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            wrong += [(name, p.grad, q.grad)] if (p.grad is None) != (q.grad is None) else []
            continue
        by = float((p.grad.to_dense() - q.grad.to_dense()).abs().max())
        wrong += [(name, by)] if not by <= tolerance else []
    return wrong


def bits(tensors: nn.Module | Iterable[Tensor]) -> list[bytes]:
    """The tensors', or a model's parameters' and buffers', every byte."""
    if isinstance(tensors, nn.Module):
        tensors = [*tensors.parameters(), *tensors.buffers()]
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def same_bits(tensors: nn.Module | Iterable[Tensor]) -> bool:
    """trap 32: replicas that differ in one bit drift apart (collective)."""
    mine = bits(tensors)
    return all(theirs == mine for theirs in everyone(mine))
