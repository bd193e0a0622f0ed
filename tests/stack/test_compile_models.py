"""torch.compile of DDP, FSDP2 and DTensor over MPI: the weights that one process gets on the whole batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.stack.compiled import CONFIG, FILTERS, backends, compiled, fresh, on  # noqa: F401
from tests.stack.sharded import ROWS, differences, same_bits, sgd, train
from tests.support import agree
from tests.support.torch_backend import of_rank

SECTION = "Functional collectives and torch.compile"

pytestmark = [*FILTERS, pytest.mark.usefixtures("fresh")]

STEPS = 3


class Layers(nn.Module):
    """Of its own class: what torch.nn.Sequential does, dynamo does not compile."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise((6, width, width, width, 3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


Way = Callable[[Layers, Any], Any]  # the model and the compiler of its graphs -> what to train


def with_ddp(mb: float) -> Way:
    return lambda model, backend: torch.compile(DistributedDataParallel(model, bucket_cap_mb=mb), backend=backend)


def of_a_compiled_module(model: Layers, backend: Any) -> Any:
    """Once under no_sync, which leaves nothing behind but a graph."""
    parallel = DistributedDataParallel(torch.compile(model, backend=backend, fullgraph=True))  # type: ignore[arg-type]
    with parallel.no_sync():
        parallel(torch.ones(ROWS, 6)).sum().backward()
    return parallel


def layer_by_layer(model: Layers, backend: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend=backend)
        fully_shard(layer)  # type: ignore[arg-type]
    return fully_shard(model)


def as_a_whole(model: Layers, backend: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer)  # type: ignore[arg-type]
    return torch.compile(fully_shard(model), backend=backend)


COMPILED_DDP = "compiled DDP: ddp_optimizer (graphs split at buckets), python_reducer, no_optimization"
MODELS = {  # feature, way, its options, width of the layers, number of graphs
    # Buckets of 1 MiB, layers of more: DDPOptimizer splits the graph, so that all-reduces overlap with backward.
    "ddp_optimizer": (COMPILED_DDP, with_ddp(1), {"optimize_ddp": "ddp_optimizer"}, 530, 3),
    "no_optimization": (COMPILED_DDP, with_ddp(1), {"optimize_ddp": "no_optimization"}, 6, 1),
    # Gradients are all-reduced by functional collectives in the compiled backward.
    "python_reducer": (COMPILED_DDP, with_ddp(0.0001), {"optimize_ddp": "python_reducer", "compiled_autograd": True}, 6, None),
    "module": ("DDP of a compiled module, no_sync", of_a_compiled_module, {}, 6, 1),
    "fsdp-layers": ("compiled FSDP2: layer by layer, and the whole model", layer_by_layer, {}, 6, None),
    "fsdp-whole": ("compiled FSDP2: layer by layer, and the whole model", as_a_whole, {}, 6, None),
}


@pytest.mark.parametrize(
    ("backend", "way", "options", "width", "graphs"),
    [
        on(backend, "inductor: DDP and FSDP2" if backend == "inductor" else feature, *values, id=f"{backend}-{name}")
        for backend in ("aot_eager", "inductor")
        for name, (feature, *values) in MODELS.items()
    ],
)
def test_trains_as_one_process_does(
    backend: str, way: Way, options: dict[str, Any], width: int, graphs: int | None, rank: int, size: int
) -> None:
    """The weights of one process, and the same bits on all ranks."""
    model, reference, counter = Layers(width), Layers(width), CompileCounterWithBackend(backend)
    with CONFIG.patch(**options):
        parallel = way(model, counter)
        train(parallel, sgd(model.parameters()), range(STEPS), rank, size, torch.float32)
    train(reference, sgd(reference.parameters()), range(STEPS), None, size, torch.float32)
    bad = differences(model.parameters(), reference.parameters(), 1e-6, 1e-4)
    agree(same_bits(model.parameters()) and not bad and graphs in (None, counter.frame_count), (bad, counter.frame_count))


@backends("compiled DTensor, fullgraph", "DTensor")
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
