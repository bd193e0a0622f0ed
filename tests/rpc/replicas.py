"""What the tests of DDP in distributed autograd contexts share: a module, each rank's data, and the gradients of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import mpicoll.autograd as dist_autograd

MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 1e-5},
]


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def rows(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def in_context(module: nn.Module, loss: Callable[[], Tensor]) -> list[Tensor | None]:
    """The gradients of the module's parameters."""
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss()])
        gradients = dist_autograd.get_gradients(context_id)
        return [gradients.get(parameter) for parameter in module.parameters()]


def averaged(module: nn.Module, losses: list[Callable[[nn.Module], Tensor]]) -> list[Tensor | None]:
    """One process: what DDP's ranks, each with its loss, have on average. None: no loss depends on that parameter."""
    alone = copy.deepcopy(module)
    alone.zero_grad()
    for loss in losses:
        loss(alone).backward()
    return [None if p.grad is None else p.grad / len(losses) for p in alone.parameters()]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    def alike(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.layout == b.layout and torch.allclose(a.to_dense(), b.to_dense())

    return all(alike(a, b) for a, b in zip(found, expected, strict=True))


def loss_of(step: int, rank: int) -> Callable[[nn.Module], Tensor]:
    return lambda module: module(rows(rank, step)).square().sum()
