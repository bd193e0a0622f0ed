"""RemoteModule: what PyTorch's own tests of it, which run over mpicoll, leave out (trap 86)."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpicoll.nn
from mpicoll import rpc
from mpicoll.nn import RemoteModule
from tests.support import agree


class Scaled(nn.Module):
    def __init__(self, factor: float, bias: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), factor))
        self.bias = bias

    def forward(self, x: Tensor, y: Any = 0, *, times: int = 1) -> Tensor:
        return (self.weight * x + self.bias + y) * times


@pytest.fixture(params=["name", "name/cpu", "rank/cpu"])
def module(request: pytest.FixtureRequest, right: str, rank: int, size: int) -> RemoteModule:
    other = f"rank:{(rank + 1) % size}" if request.param.startswith("rank") else right
    return RemoteModule(other + request.param[4:], Scaled, (2.0,), {"bias": 1.0})


def call(module: RemoteModule, x: Tensor) -> Tensor:
    return module(x)  # type: ignore[no-any-return]


class Hybrid(nn.Module):
    def __init__(self, remote: RemoteModule) -> None:
        super().__init__()
        self.remote = remote
        self.local = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.local(self.remote(x))  # type: ignore[no-any-return]


def test_passed_on(module: RemoteModule, right: str) -> None:
    """To another worker, by itself and inside a module; never by pickle alone."""
    x = torch.ones(3)
    agree(rpc.rpc_sync(right, call, (module, x)).tolist() == [3.0] * 3)
    hybrid = Hybrid(module)
    agree(torch.equal(rpc.rpc_sync(right, hybrid, (x,)), hybrid(x)))
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        pickle.dumps(module)
    again = RemoteModule.init_from_module_rref(f"{module.get_module_rref().owner_name()}/cpu", module.get_module_rref())
    agree(again(x).tolist() == [3.0] * 3)


def test_an_interface_of_torchscript(right: str) -> None:
    with pytest.raises(ValueError, match="TorchScript"):
        RemoteModule(right, Scaled, (1.0,), _module_interface_cls=Scaled)
    agree(True)


def test_only_in_rpc() -> None:
    with pytest.raises(AssertionError, match=r"RemoteModule only works in RPC\."):
        RemoteModule("worker0", Scaled, (1.0,))
    assert mpicoll.nn.api.remote_module.RemoteModule is RemoteModule
    agree(True)
