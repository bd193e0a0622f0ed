"""torch.compile of DDP, FSDP2, DTensor and compiled autograd over MPI: the weights that one process gets on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.stack.compiled import CONFIG, FILTERS, compiled, fresh  # noqa: F401
from tests.support import agree, everyone
from tests.support.torch_backend import of_rank

SECTION = "Functional collectives and torch.compile"

pytestmark = [*FILTERS, pytest.mark.usefixtures("fresh")]

ROWS, STEPS = 4, 3


class Layers(nn.Module):
    """Of its own class: what torch.nn.Sequential does, dynamo does not compile."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int, size: int, width: int) -> Tensor:
    return torch.randn(ROWS * size, width, generator=torch.Generator().manual_seed(step))


def train(forward: Callable[[Tensor], Tensor], parameters: Any, width: int, rank: int | None, size: int) -> None:
    """SGD on the whole batch (rank None) or on this rank's share."""
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    for step in range(STEPS):
        x = batch(step, size, width)
        x = x if rank is None else x.chunk(size)[rank]
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        optimizer.step()


def reference(size: int, width: int = 6) -> Layers:
    model = Layers(width)
    train(model, model.parameters(), width, None, size)
    return model


def equal(model: nn.Module, other: nn.Module) -> bool:
    """The weights of one process, and the same bits on all ranks."""
    whole = [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]
    bits = [p.numpy().tobytes() for p in whole]
    close = all(torch.allclose(p, q, rtol=1e-4, atol=1e-6) for p, q in zip(whole, other.parameters(), strict=True))
    return close and all(theirs == bits for theirs in everyone(bits))


@pytest.mark.feature("compiled DDP: ddp_optimizer (graphs split at buckets), python_reducer, no_optimization")
@pytest.mark.parametrize("mode", ["ddp_optimizer", "no_optimization"])
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_ddp(backend: str, mode: str, rank: int, size: int) -> None:
    """Buckets of 1 MiB, layers of more: DDPOptimizer splits the graph, so that all-reduces overlap with backward."""
    width = 530
    model = Layers(width)
    counter = CompileCounterWithBackend(backend)
    with CONFIG.patch(optimize_ddp=mode):
        parallel = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend=counter)
        train(parallel, parallel.parameters(), width, rank, size)
    agree(
        equal(model, reference(size, width)) and counter.frame_count == (3 if mode == "ddp_optimizer" else 1), counter.frame_count
    )


@pytest.mark.feature("compiled DDP: ddp_optimizer (graphs split at buckets), python_reducer, no_optimization")
@pytest.mark.parametrize("mode", ["python_reducer", "python_reducer_without_compiled_forward"])
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_ddp_in_the_graph(backend: str, mode: str, rank: int, size: int) -> None:
    """The reducer in Python: gradients are all-reduced by functional collectives in the compiled backward."""
    model = Layers()
    with CONFIG.patch(optimize_ddp=mode, compiled_autograd=True):
        parallel = torch.compile(DistributedDataParallel(model, bucket_cap_mb=0.0001), backend=backend)
        train(parallel, parallel.parameters(), 6, rank, size)
    agree(equal(model, reference(size)))


@pytest.mark.feature("DDP of a compiled module, no_sync")
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_ddp_of_a_compiled_module(backend: str, rank: int, size: int) -> None:
    model = Layers()
    inner = torch.compile(model, backend=backend, fullgraph=True)
    parallel = DistributedDataParallel(inner)  # type: ignore[arg-type]
    with parallel.no_sync():
        parallel(batch(0, size, 6).chunk(size)[rank]).sum().backward()
    train(parallel, parallel.parameters(), 6, rank, size)
    agree(equal(model, reference(size)))


@pytest.mark.feature("compiled FSDP2: layer by layer, and the whole model")
@pytest.mark.parametrize("how", ["layers", "whole"])
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_fsdp2(backend: str, how: str, rank: int, size: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Layers()
    for layer in model.layers:
        if how == "layers":
            layer.compile(backend=backend)
        fully_shard(layer)
    fully_shard(model)
    forward = torch.compile(model, backend=backend) if how == "whole" else model
    train(forward, model.parameters(), 6, rank, size)
    agree(equal(model, reference(size)))


@pytest.mark.feature("compiled tensor parallel and DTensor, fullgraph")
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_dtensor(backend: str, rank: int, size: int) -> None:
    """Redistributions in the graph become functional collectives."""
    mesh = init_device_mesh("cpu", (size,))

    def function(x: DTensor) -> tuple[Tensor, ...]:
        y = x.redistribute(placements=[Replicate()]) * 2
        z = (x @ x.t().redistribute(placements=[Replicate()])).redistribute(placements=[Shard(1)])
        total = DTensor.from_local(x.to_local().sum(0), mesh, [Partial()]).redistribute(placements=[Replicate()])
        return y.to_local(), z.to_local(), total.to_local()

    whole = of_rank(1, 2 * size + 1, 3).double()
    got = []
    for call in (compiled(function, backend), function):
        x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        outcome = call(x)
        sum(part.square().sum() for part in outcome).backward()  # type: ignore[union-attr]
        got.append([part.detach() for part in outcome] + [x.grad.full_tensor()])  # type: ignore[union-attr]
    agree(all(torch.allclose(a, b) for a, b in zip(*got, strict=True)), got)


@pytest.mark.feature("compiled tensor parallel and DTensor, fullgraph")
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_tensor_parallel(backend: str, rank: int, size: int) -> None:
    """Two layers over the ranks, one all-reduce, the weights of one process."""
    width = 6 * size
    mesh = init_device_mesh("cpu", (size,))
    model, alone = Layers(width, 2), Layers(width, 2)
    parallelize_module(model, mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
    call = compiled(model, backend)
    train(call, model.parameters(), width, None, size)
    train(alone, alone.parameters(), width, None, size)
    agree(equal(model, alone))


@pytest.mark.feature("compiled autograd: collectives in a compiled backward")
@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_autograd(backend: str, rank: int, size: int) -> None:
    """The backward of functional collectives, and a hook that all-reduces a gradient, in one graph."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (funcol.all_reduce(x @ w, "sum", dist.group.WORLD) ** 2).sum()

    def reduced(gradient: Tensor) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(gradient, "sum", dist.group.WORLD))

    got = []
    for on in (True, False):
        x = of_rank(rank, 3, 4).double()
        w = of_rank(0, 4, 2).double().requires_grad_()
        w.register_hook(reduced)
        with CONFIG.patch(compiled_autograd=on):
            call = torch.compile(function, backend=backend, fullgraph=True) if on else function
            call(x, w).backward()
        got.append(w.grad)
    alone = of_rank(0, 4, 2).double().requires_grad_()
    total = sum(of_rank(r, 3, 4).double() for r in range(size)) @ alone
    (size * (total**2).sum()).backward()  # every rank has the loss, and its gradient reaches every rank's product
    agree(torch.allclose(*got) and torch.allclose(got[0], alone.grad), (got, alone.grad))  # type: ignore[arg-type]
