"""torch.compile of functions that communicate over MPI, functional and classic, through both doors: the numbers of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._C._distributed_c10d import _get_work_registry_size
from torch._dynamo.utils import counters

from tests.stack.compiled import CONFIG, DOORS, FILTERS, backends, compiled, fresh, module  # noqa: F401
from tests.support import agree
from tests.support.torch_backend import of_rank

SECTION = "Functional collectives and torch.compile"

FUNCTIONAL = "functional collectives, fullgraph, gradients"
CLASSIC = "compiled dist.all_reduce, all_gather_into_tensor, ...: fullgraph, through both doors"
MESSAGES = "compiled isend, irecv, batch_isend_irecv: fullgraph (TORCHDYNAMO_ENABLE_P2P_COMPILATION=1)"

pytestmark = [*FILTERS, pytest.mark.usefixtures("fresh")]

NEW = hasattr(funcol, "all_gather_single")  # torch < 2.13 gathers contiguous tensors only, and in a graph along dim 0 only
all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)


def same(got: Any, expected: Any) -> bool:
    if isinstance(got, Tensor):
        return torch.allclose(got, expected) and got.dtype == expected.dtype
    return len(got) == len(expected) and all(same(g, e) for g, e in zip(got, expected, strict=True))


def entered() -> list[str]:
    """The functions of mpicoll that dynamo has compiled."""
    codes = [reference() for reference in torch._dynamo.convert_frame.input_codes.seen]
    return [code.co_qualname for code in codes if code is not None and "/mpicoll/" in code.co_filename]


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


@backends("compiled functional collectives, fullgraph: eager, aot_eager", FUNCTIONAL, "eager", "aot_eager")
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


@pytest.mark.feature("compiled functional collectives: subgroups, meshes, names; other groups in later calls")
def test_groups(rank: int, size: int) -> None:
    """One compiled function called with one group after the other must not keep the first."""
    mesh = dist.init_device_mesh("cpu", (size // 2, 2) if size % 2 == 0 else (size, 1))
    alone = [dist.new_group([r]) for r in range(size)][rank]
    call = compiled(by_group, "aot_eager", dynamic=False)
    groups = [dist.group.WORLD, alone, mesh.get_group(1), (mesh, 0), (mesh, 1), dist.group.WORLD.group_name]  # type: ignore[union-attr]
    for group in groups * 2:
        x = of_rank(rank, 3)
        agree(torch.equal(call(x, group), by_group(x, group)), group)


@backends("compiled functional collectives: gradients equal to eager's", FUNCTIONAL)
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


@backends(CLASSIC, "classic collectives, fullgraph, through both doors", "eager", "aot_eager")
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

    def barrier(x: Tensor) -> Tensor:
        y = x * 2
        d.barrier()
        return y + 1

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

    return {f.__name__: f for f in (broadcast, asynchronous, barrier, messages, batch, uneven)}


@pytest.mark.feature("compiled functions with what breaks the graph: broadcast, barrier, async_op, messages; both doors")
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


@backends(MESSAGES, "isend, irecv, batch_isend_irecv, fullgraph")
@pytest.mark.skipif(not hasattr(CONFIG, "enable_p2p_compilation"), reason="needs torch >= 2.13")
@DOORS
@pytest.mark.parametrize("name", ["messages", "batch"])
def test_messages_in_the_graph(backend: str, name: str, door: str, rank: int, size: int) -> None:
    """mpicoll.isend and irecv go into the graph; mpicoll.batch_isend_irecv, whose P2POp is not torch's, breaks it.

    No Work is left in torch's registry, which torch would report when the process ends. torch's own isend leaves one under the
    tensor that is sent, with Gloo as well.
    """
    function, unwaited = breaking(door, size)[name], _get_work_registry_size()
    x = of_rank(rank, size + 1, 3)
    expected = function(x)
    with CONFIG.patch(enable_p2p_compilation=True):
        call = compiled(function, backend, fullgraph=name == "messages" or door == "torch.distributed")
        agree(torch.equal(call(x), expected))
    torch.ops._c10d_functional.wait_tensor(x)
    agree(_get_work_registry_size() == unwaited, _get_work_registry_size())


@pytest.mark.feature("functional: collectives started by dist.*(async_op=True) and waited for by their tensor")
@pytest.mark.feature("a collective begun before a compiled function and waited for in it; both doors")
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


@pytest.mark.feature("compiled functions after the world was destroyed and made again")
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
