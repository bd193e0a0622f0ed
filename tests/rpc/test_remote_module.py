"""RemoteModule: a module on another worker that is called, trained and passed on like one that is here (trap 86)."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpicoll.nn
from mpicoll import autograd, optim, rpc
from mpicoll.nn import RemoteModule
from tests.support import agree


class Scaled(nn.Module):
    def __init__(self, factor: float, bias: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), factor))
        self.inner = nn.Linear(3, 3)
        self.bias = bias

    def forward(self, x: Tensor, y: Any = 0, *, times: int = 1) -> tuple[Tensor, str]:
        return (self.weight * x + self.bias + y) * times, "trains" if self.training else "evaluates"


class NoModule:
    pass


@pytest.fixture(params=["name", "name/cpu", "rank/cpu"])
def module(request: pytest.FixtureRequest, right: str, rank: int, size: int) -> RemoteModule:
    other = f"rank:{(rank + 1) % size}" if request.param.startswith("rank") else right
    return RemoteModule(other + request.param[4:], Scaled, (2.0,), {"bias": 1.0})


def test_forward(module: RemoteModule) -> None:
    x = torch.ones(3)
    found = [module(x)[0], module(x, 1, times=2)[0], module.forward(x, y=1)[0], module.forward_async(x, 4).wait()[0]]
    agree([tensor[0].item() for tensor in found] == [3.0, 8.0, 4.0, 7.0], found)


def test_modes(module: RemoteModule) -> None:
    """There, where it counts, and in the answer: train and eval return the RemoteModule."""
    x = torch.ones(3)
    said = [module(x)[1], module.eval()(x)[1], module.train()(x)[1], module.train(False)(x)[1]]
    agree(said == ["trains", "evaluates", "trains", "evaluates"] and not module.training, said)


def test_it_trains(module: RemoteModule) -> None:
    """DistributedOptimizer over its parameters, against the same steps here."""
    here = Scaled(2.0, 1.0)
    parameters = module.remote_parameters(recurse=False)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    local = torch.optim.SGD([here.weight], lr=0.1)
    x = torch.arange(3.0)
    for _ in range(3):
        with autograd.context() as context_id:
            autograd.backward(context_id, [module(x)[0].pow(2).sum()])
            optimizer.step(context_id)
        local.zero_grad()
        here(x)[0].pow(2).sum().backward()
        local.step()
    found = parameters[0].to_here()
    agree(torch.allclose(found, here.weight) and len(module.remote_parameters()) == 3, (found, here.weight))


def call(module: RemoteModule, x: Tensor) -> Tensor:
    return module(x)[0]  # type: ignore[no-any-return]


class Hybrid(nn.Module):
    def __init__(self, remote: RemoteModule) -> None:
        super().__init__()
        self.remote = remote
        self.local = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.local(self.remote(x)[0])  # type: ignore[no-any-return]


def test_passed_on(module: RemoteModule, right: str) -> None:
    """To another worker, by itself and inside a module; never by pickle alone."""
    x = torch.ones(3)
    agree(rpc.rpc_sync(right, call, (module, x)).tolist() == [3.0] * 3)
    hybrid = Hybrid(module)
    agree(torch.equal(rpc.rpc_sync(right, hybrid, (x,)), hybrid(x)))
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        pickle.dumps(module)
    again = RemoteModule.init_from_module_rref(f"{module.get_module_rref().owner_name()}/cpu", module.get_module_rref())
    agree(again(x)[0].tolist() == [3.0] * 3)


def test_mistakes(right: str) -> None:
    with pytest.raises(ValueError, match=r"returns an instance of <class nn.Module>.*NoModule"):
        RemoteModule(right, NoModule)(1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="could not find destination"):
        RemoteModule("nobody/cpu", Scaled, (1.0,))
    with pytest.raises(ValueError, match="Could not parse remote_device"):
        RemoteModule(f"{right}/cpu/7", Scaled, (1.0,))
    with pytest.raises(ValueError, match="TorchScript"):
        RemoteModule(right, Scaled, (1.0,), _module_interface_cls=Scaled)
    agree(True)


def test_only_in_rpc() -> None:
    with pytest.raises(AssertionError, match=r"RemoteModule only works in RPC\."):
        RemoteModule("worker0", Scaled, (1.0,))
    assert mpicoll.nn.api.remote_module.RemoteModule is RemoteModule
    agree(True)
