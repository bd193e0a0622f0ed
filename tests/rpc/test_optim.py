"""DistributedOptimizer: the steps of one process, with the gradients of the context (88)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.optim import DistributedOptimizer
from tests.rpc.layers import Layer, near, through, x_of
from tests.support import agree

OWN_TESTS = {"Optimizer", "LBFGS", "SparseAdam"}  # the base; wants a closure; wants sparse gradients
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in OWN_TESTS
)
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.1, "amsgrad": True}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, workers: list[str], rank: int, size: int) -> None:
    """Three steps over parameters on every worker equal one process; .grad stays what it was."""
    kind, options = getattr(torch.optim, name), OPTIONS.get(name, {})
    layers = [rpc.remote(worker, Layer, (k,)) for k, worker in enumerate(workers)]
    optimizer = DistributedOptimizer(kind, [p for layer in layers for p in layer.rpc_sync().parameter_rrefs()], **options)
    modules = [Layer(k) for k in range(size)]
    plain = kind([module.weight for module in modules], **options)
    for step in range(3):
        x = x_of(100 * rank + step)
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync(layers[0].owner(), through, (layers, x))
            dist_autograd.backward(context_id, [y.square().sum()])
            optimizer.step(context_id)
        y = x.detach()
        for module in modules:
            y = module(y)
        plain.zero_grad()
        y.square().sum().backward()
        plain.step()
    found = [layer.rpc_sync().parameter_rrefs()[0].to_here() for layer in layers]
    good = all(near(a.detach(), m.weight.detach()) for a, m in zip(found, modules, strict=True))
    agree(good and all(layer.rpc_sync().own_gradient() is None for layer in layers), found)


def test_an_optimizer_that_wants_a_closure(right: str) -> None:
    """There is none across workers: torch's own error, here."""
    optimizer = DistributedOptimizer(torch.optim.LBFGS, rpc.remote(right, Layer).rpc_sync().parameter_rrefs())
    with dist_autograd.context() as context_id, pytest.raises(TypeError, match="closure"):
        optimizer.step(context_id)
    agree(True)
