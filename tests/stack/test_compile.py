"""torch.compile over MPI: functions that communicate, functional and classic, have the numbers of eager, through both doors.

DDP, FSDP2 and DTensor have the weights that one process gets on the whole batch.
"""

import importlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll._c10d.names import BACKEND_SUBCLASSES
from tests.stack.sharded import ROWS, differences, same_bits, sgd, train
from tests.support import agree
from tests.support.torch_backend import of_rank

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:.*combination of ranks:FutureWarning"),
    pytest.mark.usefixtures("fresh"),
]

DOORS = pytest.mark.parametrize("door", ["torch.distributed", "mpicoll"])
CONFIG: Any = torch._dynamo.config

INDUCTOR = [  # C++ compiled by g++, collectives in place; half a minute each where its cache is cold
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]


def on(backend: str, *values: Any, **options: Any) -> Any:
    return pytest.param(backend, *values, marks=INDUCTOR if backend == "inductor" else (), **options)


def backends(*names: str) -> Any:
    """``names``: those that need no compiler."""
    return pytest.mark.parametrize("backend", [*names, on("inductor")])


@pytest.fixture
def fresh() -> Iterator[None]:
    """No compiled code and no counts of other tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def module(door: str) -> Any:
    """``import mpicoll as dist`` or ``import torch.distributed as dist``."""
    return importlib.import_module(door)


def compiled(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    """In one graph, unless told otherwise."""
    return torch.compile(function, backend=backend, **{"fullgraph": True, **options})


NEW = hasattr(funcol, "all_gather_single")  # torch < 2.13 gathers contiguous tensors only, and in a graph along dim 0 only
all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


def same(got: Any, expected: Any) -> bool:
    if isinstance(got, Tensor):
        return torch.allclose(got, expected) and got.dtype == expected.dtype
    return len(got) == len(expected) and all(same(g, e) for g, e in zip(got, expected, strict=True))


PACKAGE = os.path.dirname(mpicoll.__file__) + os.sep  # the folder of the clone may be called mpicoll, and have torch in it


def entered() -> list[str]:
    """The functions of mpicoll that dynamo has compiled."""
    codes = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
    return [code.co_qualname for code in codes if code is not None and code.co_filename.startswith(PACKAGE)]


def functional(x: Tensor, size: int, other: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Every functional collective, between other work."""
    group: Any = dist.group.WORLD
    y = x.sin() * 2
    half = funcol.all_reduce_coalesced([y[0], y.to(other)], "max", group)
    return [
        funcol.all_reduce(y, "sum", group) + 1,
        funcol.all_reduce(y.long(), "max", group),
        all_gather(y.t() if NEW else y.t().contiguous(), 0, group) * 2,
        all_gather(y, int(NEW), group),
        reduce_scatter(y, "sum", 0, group).cos(),
        reduce_scatter(y.t().contiguous(), "avg", 1, group),
        funcol.all_to_all_single(y, None, None, group),
        funcol.broadcast(y, 0, group),
        # torch < 2.13 traces the size of a group only where the group is of its own class
        *([funcol.permute_tensor(y.flatten(), [(r + 1) % size for r in range(size)], group)] if NEW else []),
        *half,
        y,
    ]


@backends("eager", "aot_eager")
def test_functional(backend: str, rank: int, size: int) -> None:
    """All of them in one graph.

    torch 2.15's inductor brings the outputs of a coalesced collective to one dtype, before they are waited for: wrong, on any
    backend that takes several dtypes.
    """
    other = torch.float32 if backend == "inductor" and hasattr(torch.ops._c10d_functional, "wait_tensors") else torch.bfloat16
    x = of_rank(rank, 2 * size, 3)
    call = compiled(functional, backend)
    for _ in range(2):
        agree(same(call(x, size, other), functional(x, size, other)), counters["graph_break"])


def by_group(x: Tensor, group: Any) -> Tensor:
    return funcol.all_reduce(x * 2, "sum", group) + 1


def test_groups(rank: int, size: int) -> None:
    """One compiled function called with one group after the other must not keep the first."""
    mesh = dist.init_device_mesh("cpu", (size // 2, 2) if size % 2 == 0 else (size, 1))
    alone = [dist.new_group([r]) for r in range(size)][rank]
    call = compiled(by_group, "aot_eager", dynamic=False)
    groups = [dist.group.WORLD, alone, mesh.get_group(1), (mesh, 0), (mesh, 1), dist.group.WORLD.group_name]  # type: ignore[union-attr]
    for group in groups * 2:
        x = of_rank(rank, 3)
        agree(torch.equal(call(x, group), by_group(x, group)), group)


@backends("aot_eager")
def test_gradients(backend: str, rank: int, size: int) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = funcol.all_reduce(x @ w, "sum", dist.group.WORLD).relu()
        z = all_gather(reduce_scatter(y * w, "sum", 0, dist.group.WORLD), int(NEW), dist.group.WORLD)
        return (funcol.all_to_all_single(z, None, None, dist.group.WORLD) ** 2).sum()

    gradients = []
    for call in (compiled(function, backend), function):
        x, w = (of_rank(rank + k + 1, size * size, size * size).double().div(10).requires_grad_() for k in range(2))
        call(x, w).backward()
        gradients.append([x.grad, w.grad])
    agree(same(*gradients) and bool(gradients[0][0].abs().sum() > 0), gradients)  # type: ignore[union-attr]


def classic(door: str, size: int) -> Callable[[Tensor], list[Tensor]]:
    """Every classic collective that dynamo can put into a graph."""
    d = module(door)

    def function(x: Tensor) -> list[Tensor]:
        y = x * 2
        total, largest, mean = y.clone(), y.clone(), y.clone()
        d.all_reduce(total)
        d.all_reduce(largest, op=d.ReduceOp.MAX)
        d.all_reduce(mean, d.ReduceOp.AVG, group=d.group.WORLD, async_op=False)
        gathered = torch.empty(size * y.shape[0], *y.shape[1:])
        d.all_gather_into_tensor(gathered, y)
        block = torch.empty(y.shape[0] // size, *y.shape[1:])
        d.reduce_scatter_tensor(block, y + 1)
        arrived = torch.empty_like(y)
        d.all_to_all_single(arrived, y)
        listed = [torch.empty_like(y) for _ in range(size)]
        d.all_gather(listed, y)
        return [total, largest, mean, gathered, block, arrived, *listed, y * d.get_rank() + d.get_world_size()]

    return function


@backends("eager", "aot_eager")
@DOORS
def test_classic(backend: str, door: str, rank: int, size: int) -> None:
    """dynamo puts functional collectives in their place; mpicoll.* must show it torch's functions there."""
    function = classic(door, size)
    x = of_rank(rank, 2 * size, 3)
    call = compiled(function, backend)
    for _ in range(2):
        agree(same(call(x), function(x)))


def breaking(door: str, size: int) -> dict[str, Callable[[Tensor], Any]]:
    """What breaks the graph on every backend."""
    d = module(door)

    def broadcast(x: Tensor) -> Tensor:
        y = x * 2
        d.broadcast(y, size - 1)
        return y + 1

    def asynchronous(x: Tensor) -> Tensor:
        y = x * 2
        work = d.all_reduce(y, async_op=True)
        z = x * 3
        work.wait()
        return y + z

    def messages(x: Tensor) -> Tensor:
        z = torch.empty_like(x)
        sent = d.isend(x, (d.get_rank() + 1) % size)
        received = d.irecv(z, (d.get_rank() - 1) % size)
        sent.wait()
        received.wait()
        return z * 2 + x

    def batch(x: Tensor) -> Tensor:
        y, z = x * 2, torch.empty_like(x)
        right, left = (d.get_rank() + 1) % size, (d.get_rank() - 1) % size
        for work in d.batch_isend_irecv([d.P2POp(d.isend, y, right), d.P2POp(d.irecv, z, left)]):
            work.wait()
        return z + y

    def uneven(x: Tensor) -> Tensor:
        y = x * 2
        parts = [torch.empty(r + 1, *y.shape[1:]) for r in range(size)]
        d.all_to_all(parts, [y[: d.get_rank() + 1] for _ in range(size)])
        return torch.cat(parts) + 1

    return {f.__name__: f for f in (broadcast, asynchronous, messages, batch, uneven)}


@DOORS
@pytest.mark.parametrize("name", breaking("torch.distributed", 1))
def test_graph_breaks(name: str, door: str, rank: int, size: int) -> None:
    """Between the graphs torch's C++ backends are closed to dynamo; of ours it would compile every frame, and fail."""
    function = breaking(door, size)[name]
    x = of_rank(rank, size + 1, 3)
    call = compiled(function, "aot_eager", fullgraph=False)
    for _ in range(2):
        agree(torch.equal(call(x), function(x)), counters["graph_break"])
    agree(not entered(), entered())


@backends("aot_eager")
@pytest.mark.skipif(not hasattr(CONFIG, "enable_p2p_compilation"), reason="needs torch >= 2.13")
@DOORS
@pytest.mark.parametrize("name", ["messages", "batch"])
def test_messages_in_the_graph(backend: str, name: str, door: str, rank: int, size: int) -> None:
    """mpicoll.isend and irecv go into the graph; mpicoll.batch_isend_irecv, whose P2POp is not torch's, breaks it.

    No Work is left in torch's registry, which torch would report when the process ends. torch's own isend leaves one under the
    tensor that is sent, and torch 2.14's batch_isend_irecv one for good, both with Gloo as well, but
    not in each run of torch 2.14.1.
    """
    most = 1 if name == "batch" and door == "torch.distributed" and BACKEND_SUBCLASSES else 0
    function, unwaited = breaking(door, size)[name], _get_work_registry_size()
    x = of_rank(rank, size + 1, 3)
    expected = function(x)
    with CONFIG.patch(enable_p2p_compilation=True):
        call = compiled(function, backend, fullgraph=name == "messages" or door == "torch.distributed")
        agree(torch.equal(call(x), expected))
    torch.ops._c10d_functional.wait_tensor(x)
    agree(unwaited <= _get_work_registry_size() <= unwaited + most, _get_work_registry_size())


@DOORS
def test_begun_outside(door: str, rank: int, size: int) -> None:
    """wait_tensor in the graph finds what was started before it (allow_inflight_collective_as_graph_input_ctx)."""
    d = module(door)

    def function(y: Tensor) -> Tensor:
        y = torch.ops._c10d_functional.wait_tensor(y)
        return y * y

    call = compiled(function, "aot_eager")
    for _ in range(2):
        with funcol.allow_inflight_collective_as_graph_input_ctx():
            y = of_rank(rank, 300_000)
            d.all_reduce(y, async_op=True)
            total = torch.stack([of_rank(r, 300_000) for r in range(size)]).sum(0)
            agree(torch.equal(call(y), total * total))


def test_another_world(rank: int, size: int) -> None:
    """The graph names its group; the next world's may be another."""

    def function(x: Tensor) -> Tensor:
        dist.all_reduce(y := x * 2)
        return by_group(y, dist.group.WORLD)

    x = of_rank(rank, 3)
    call = compiled(function, "aot_eager")
    expected = function(x)
    agree(torch.equal(call(x), expected))
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("mpi")
        agree(torch.equal(call(x), expected))


# -- models ------------------------------------------------------------------------------------------------------------

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


MODELS = {  # way, its options, width of the layers, number of graphs
    # Buckets of 1 MiB, layers of more: DDPOptimizer splits the graph, so that all-reduces overlap with backward.
    "ddp_optimizer": (with_ddp(1), {"optimize_ddp": "ddp_optimizer"}, 530, 3),
    "no_optimization": (with_ddp(1), {"optimize_ddp": "no_optimization"}, 6, 1),
    # Gradients are all-reduced by functional collectives in the compiled backward.
    "python_reducer": (with_ddp(0.0001), {"optimize_ddp": "python_reducer", "compiled_autograd": True}, 6, None),
    "module": (of_a_compiled_module, {}, 6, 1),
    "fsdp-layers": (layer_by_layer, {}, 6, None),
    "fsdp-whole": (as_a_whole, {}, 6, None),
}


@pytest.mark.parametrize(
    ("backend", "way", "options", "width", "graphs"),
    [on(backend, *values, id=f"{backend}-{name}") for backend in ("aot_eager", "inductor") for name, values in MODELS.items()],
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


@backends("aot_eager")
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
