"""Groups in a world whose ranks have GPUs, pretended ones (fake_gpu.py), by each way that their memory may travel.

Chunks are small here, so that all of them take many turns.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mpicoll._algorithms import direct
from mpicoll._device import collectives, ipc_window, messages, staging
from mpicoll._device.consensus import DeviceChoices
from mpicoll._engine.communicator import Communicator
from mpicoll._engine.registry import registry
from tests.gpu.fake_gpu import Gpu, OnGpu, make_mpi_aware, take_its_place

WAYS = ("staged", "ipc", "direct")
FLOATS = torch.float32
_numbers = itertools.count()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    take_its_place(made, monkeypatch)
    monkeypatch.setattr(collectives, "SMALL", 64)
    monkeypatch.setattr(ipc_window, "SLOT", 8192)
    monkeypatch.setattr(staging, "CHUNK", 4096)
    monkeypatch.setattr(direct, "CHUNK", 4096)
    monkeypatch.setattr(messages, "PIECE", 8192)
    monkeypatch.setattr(messages, "SHARED_FROM", 4096)
    return made


def group_that_goes(way: str, monkeypatch: pytest.MonkeyPatch, checks: bool = False) -> Communicator:
    """A communicator of all ranks in a world with GPUs. ``checks``: they compare their calls."""
    assert registry._world is not None
    topology, agreed, ledger = registry._world
    devices = DeviceChoices(direct=way == "direct", shares=way == "ipc")
    if way == "direct":
        make_mpi_aware(monkeypatch)
    monkeypatch.setattr(registry, "_world", (topology, agreed._replace(devices=devices, checks=checks), ledger))
    return registry.create(f"gpus {next(_numbers)}", None, 30)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(way: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    made = group_that_goes(way, monkeypatch)
    yield made
    made.barrier()
    made.close()


def values(rank: int, count: int, dtype: torch.dtype = FLOATS) -> Tensor:
    """Small whole numbers, of which every dtype here knows the sum."""
    return ((torch.arange(count, device="cpu") * 7 + 3 * rank) % 13 + rank).to(dtype)


def laid_out(given: Tensor, layout: str) -> Tensor:
    return given.view(-1, 2).t().contiguous().t() if layout == "transposed" else given.clone()


def on_gpu(rank: int, count: int, layout: str = "contiguous", dtype: torch.dtype = FLOATS) -> OnGpu:
    return laid_out(values(rank, count, dtype), layout).as_subclass(OnGpu)


def total(size: int, count: int, dtype: torch.dtype = FLOATS) -> Tensor:
    return sum(values(r, count, dtype) for r in range(size))  # type: ignore[return-value]
