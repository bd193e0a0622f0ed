"""Order with the caller's streams (traps 63, 64): slow kernels before, consumers right after, memory that is recycled."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist
from tests.support import agree

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.timeout(120)]
CYCLES = 200_000_000  # of a GPU's clock, some 0.1 s: longer than any message here
COUNT = 1 << 20


@pytest.fixture(params=["default stream", "side stream"])
def stream(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Any]:
    """The current one of the test."""
    side = request.param == "side stream" and device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream(device)) if side else nullcontext():
        yield


@contextmanager
def slowly(device: torch.device) -> Iterator[None]:
    """What is launched inside starts late."""
    if device.type == "cuda":
        torch.cuda._sleep(CYCLES)
    yield


@pytest.mark.usefixtures("stream")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_a_slow_kernel_before_all_reduce(async_op: bool, device: torch.device, rank: int, size: int) -> None:
    x = torch.zeros(COUNT, device=device)
    with slowly(device):
        x.fill_(rank + 1.0)
    work = dist.all_reduce(x, async_op=async_op)
    if work is not None:
        work.wait()
    agree((x * 2).eq(size * (size + 1)).all().item(), x[:3])  # the consumer is launched right after


@pytest.mark.usefixtures("stream")
def test_a_slow_kernel_before_a_message(device: torch.device, rank: int, size: int) -> None:
    x, y = torch.zeros(COUNT, device=device), torch.zeros(COUNT, device=device)
    request = dist.irecv(y, (rank - 1) % size)
    assert request is not None
    with slowly(device):
        x.fill_(rank + 1.0)
    dist.send(x, (rank + 1) % size)
    request.wait()
    agree(y.eq((rank - 1) % size + 1).all().item(), y[:3])


@pytest.mark.usefixtures("stream")
def test_a_slow_kernel_reads_the_old_values(device: torch.device, rank: int, size: int) -> None:
    """It was launched before the receive into the memory that it reads."""
    y = torch.full((COUNT,), -1.0, device=device)
    with slowly(device):
        old = y + 0
    request = dist.irecv(y, (rank - 1) % size)
    assert request is not None
    dist.send(torch.full((COUNT,), float(rank), device=device), (rank + 1) % size)
    request.wait()
    agree((old.eq(-1).all() & y.eq((rank - 1) % size).all()).item(), (old[:3], y[:3]))


@pytest.mark.usefixtures("stream")
def test_memory_that_is_recycled(device: torch.device, rank: int, size: int) -> None:
    """Nobody holds the tensors while they are sent; new ones take any memory that is given back too early."""
    works = []
    received = [torch.empty(COUNT, device=device) for _ in range(8)]
    for turn, y in enumerate(received):
        works.append(dist.irecv(y, (rank - 1) % size, tag=turn))
        works.append(dist.isend(torch.full((COUNT,), 10.0 * rank + turn, device=device), (rank + 1) % size, tag=turn))
        torch.full((COUNT,), -5.0, device=device)
    for work in works:
        assert work is not None
        work.wait()
    right = [y.eq(10.0 * ((rank - 1) % size) + turn).all().item() for turn, y in enumerate(received)]
    agree(all(right), right)


def test_capture_is_refused(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are a GPU's")
    x = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="MPI cannot be captured"), torch.cuda.graph(graph):
        dist.all_reduce(x)
    agree(True)


def test_ddp(device: torch.device, rank: int, size: int) -> None:
    """Three steps give what one process gives that has all ranks' batches."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).to(device) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    model, alone = DistributedDataParallel(made[0]), made[1]
    batches = [torch.randn(16, 64, generator=torch.Generator().manual_seed(r)).to(device) for r in range(size)]
    for net, inputs in ((model, batches[rank]), (alone, torch.cat(batches))):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            optimizer.step()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    agree(all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs))
