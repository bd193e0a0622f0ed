"""DistributedDataParallel in a distributed autograd context: the context gets the reduced gradients, ``.grad`` stays."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.rpc.rref import RRef
from tests.rpc.layers import Layer, near
from tests.support import agree, everyone

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Grad strides"),
]

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


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_as_one_process(mode: dict[str, Any], workers: list[str], rank: int, size: int) -> None:
    """Several iterations, with a local backward pass between them, whose gradients stay."""
    module = network()
    parallel = DistributedDataParallel(module, **mode)
    good = []
    for step in range(4):
        expected = averaged(module, [loss_of(step, r) for r in range(size)])
        found = in_context(module, lambda step=step: loss_of(step, rank)(parallel))  # type: ignore[misc]
        good.append(same(found, expected))
        if step == 0:
            good.append(all(parameter.grad is None for parameter in module.parameters()))
        if step == 1:
            loss_of(9, rank)(parallel).backward()
    local = averaged(module, [loss_of(9, r) for r in range(size)])
    good.append(same([parameter.grad for parameter in module.parameters()], local))
    agree(all(good), good)


class Branches(nn.Module):
    """Uses one of two layers, never the third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second, self.never = (nn.Linear(4, 2, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.second if which else self.first)(x)  # type: ignore[no-any-return]


def test_unused_parameters(workers: list[str], rank: int, size: int) -> None:
    """Those that only other ranks use have their gradients, those that none uses have none."""
    module = Branches()
    parallel = DistributedDataParallel(module, find_unused_parameters=True)
    expected = averaged(module, [lambda m, r=r: m(rows(r), r % 2).square().sum() for r in range(size)])  # type: ignore[misc]
    for _ in range(2):
        found = in_context(module, lambda: parallel(rows(rank), rank % 2).square().sum())
        agree(same(found, expected), (found, expected))


def test_no_sync(workers: list[str], rank: int, size: int) -> None:
    """Without reduction the context gathers this rank's gradients; the pass with reduction reduces their sum."""
    module = network()
    parallel = DistributedDataParallel(module)
    with dist_autograd.context() as context_id:
        with parallel.no_sync():
            dist_autograd.backward(context_id, [loss_of(0, rank)(parallel)])
        own = dist_autograd.get_gradients(context_id)
        kept = {parameter: own[parameter].clone() for parameter in module.parameters()}
        dist_autograd.backward(context_id, [loss_of(1, rank)(parallel)])
        last = dist_autograd.get_gradients(context_id)
    good = same([own[p] for p in module.parameters()], averaged(module, [loss_of(0, rank)]))
    good &= all(torch.equal(own[p], kept[p]) for p in module.parameters())  # what was given out stays as it was
    both = averaged(module, [lambda m, r=r: loss_of(0, r)(m) + loss_of(1, r)(m) for r in range(size)])  # type: ignore[misc]
    agree(good and same([last[p] for p in module.parameters()], both))


@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook], ids=lambda h: h.__name__)
def test_communication_hooks(hook: Any, workers: list[str], rank: int, size: int) -> None:
    module = network()
    parallel = DistributedDataParallel(module)
    parallel.register_comm_hook(None, hook)
    expected = averaged(module, [loss_of(0, r) for r in range(size)])
    found = in_context(module, lambda: loss_of(0, rank)(parallel))
    exact = hook is default_hooks.allreduce_hook
    good = all(torch.allclose(a, b, atol=0 if exact else 0.5) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
    agree(good, (found, expected))


def test_hooks_run_once(workers: list[str], rank: int, size: int) -> None:
    """Tensor hooks on the parameters, and hooks at their AccumulateGrad nodes."""
    module = network()
    seen: list[str] = []
    first = next(module.parameters())
    first.register_hook(lambda gradient: seen.append("tensor") or gradient * 2)  # type: ignore[func-returns-value]
    node = first.expand_as(first).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda gradients: seen.append("before"))  # type: ignore[union-attr,arg-type,return-value]
    node.register_hook(lambda *gradients: seen.append("after"))  # type: ignore[union-attr]
    parallel = DistributedDataParallel(module)
    expected = averaged(network(), [loss_of(0, r) for r in range(size)])
    assert expected[0] is not None
    expected[0] = expected[0] * 2
    found = in_context(module, lambda: loss_of(0, rank)(parallel))
    agree(same(found, expected) and seen == ["tensor", "before", "after"], seen)


def test_a_pass_that_ddp_would_not_reduce(workers: list[str], rank: int, size: int) -> None:
    """It reduces once after a forward pass; another backward pass had each rank's own gradients, silently."""
    module = network()
    parallel = DistributedDataParallel(module)
    with dist_autograd.context() as context_id:
        loss = loss_of(0, rank)(parallel)
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        with pytest.raises(RuntimeError, match="did not reduce the gradients of Sequential"):
            dist_autograd.backward(context_id, [loss], retain_graph=True)
        loss = loss_of(0, rank)(parallel)
        loss_of(1, rank)(parallel).backward()
        with pytest.raises(RuntimeError, match="did not reduce the gradients of Sequential"):
            dist_autograd.backward(context_id, [loss])
        found = dist_autograd.get_gradients(context_id)
    expected = averaged(module, [loss_of(0, r) for r in range(size)])
    local = averaged(module, [loss_of(1, r) for r in range(size)])
    good = same([found[p] for p in module.parameters()], expected)
    agree(good and same([p.grad for p in module.parameters()], local), (found, expected))


def test_a_context_without_ddp_meanwhile(right: str, rank: int, size: int) -> None:
    """Another thread's backward passes, of other contexts, through the same layer: neither waits for the other, nor mixes."""
    layer, module = Layer(), network()
    parallel = DistributedDataParallel(module)
    expected = averaged(module, [lambda m, r=r: m(Layer()(rows(r))).square().sum() for r in range(size)])  # type: ignore[misc]
    good: list[bool] = []
    stop = threading.Event()

    def beside() -> None:
        while not stop.is_set():
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [layer(rows(rank, 5)).sum()])
                found = dist_autograd.get_gradients(context_id)
                alone = Layer()
                alone(rows(rank, 5)).sum().backward()
                good.append(len(found) == 1 and near(found[layer.weight], alone.weight.grad))

    thread = threading.Thread(target=beside)
    thread.start()
    for _ in range(5):
        good.append(same(in_context(module, lambda: parallel(layer(rows(rank))).square().sum()), expected))
    stop.set()
    thread.join()
    agree(all(good) and layer.weight.grad is None, good)


# -- around, beside and inside remote modules


class Parallel(nn.Module):
    """A DDP module that others call."""

    def __init__(self, **mode: Any) -> None:
        super().__init__()
        self.inner = DistributedDataParallel(network(), **mode)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]

    def gradients(self, context_id: int) -> list[Tensor | None]:
        found = dist_autograd.get_gradients(context_id)
        return [found.get(parameter) for parameter in self.parameters()]

    def parameter_rrefs(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.parameters()]


_mine: list[Parallel] = []


def mine() -> RRef[Parallel]:
    return RRef(_mine[-1])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_inside_a_remote_module(mode: dict[str, Any], right: str, rank: int, size: int) -> None:
    """Every rank calls its neighbour's, in a context of its own."""
    _mine.append(Parallel(**mode))
    everyone(None)
    remote = rpc.rpc_sync(right, mine)
    x = rows(rank).requires_grad_()
    for _ in range(3):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [remote.rpc_sync().forward(x).square().sum()])
            found = remote.rpc_sync().gradients(context_id)
            own = dist_autograd.get_gradients(context_id)[x]
        expected = averaged(network(), [loss_of(0, r) for r in range(size)])
        plain = rows(rank).requires_grad_()
        network()(plain).square().sum().backward()
        agree(same(found, expected) and near(own, plain.grad), (found, expected))


@pytest.mark.parametrize("static_graph", [False, True])
def test_gradients_that_arrive_one_after_the_other(
    static_graph: bool, right: str, workers: list[str], rank: int, size: int
) -> None:
    """The module is called twice, and its second input depends on its first output: it must reduce once, all of it.

    With a static graph it would reduce when the first have come, so that is refused.
    """
    _mine.append(Parallel(static_graph=static_graph))
    everyone(None)
    remote, between = rpc.rpc_sync(right, mine), rpc.remote(workers[(rank + 2) % size], Layer)
    with dist_autograd.context() as context_id:
        first = remote.rpc_sync().forward(rows(rank))
        second = remote.rpc_sync().forward(between.rpc_sync().forward(first))
        if static_graph:
            with pytest.raises(RuntimeError, match="static_graph"):
                dist_autograd.backward(context_id, [(first * second).sum()])
            agree(True)
            return
        dist_autograd.backward(context_id, [(first * second).sum()])
        found = remote.rpc_sync().gradients(context_id)
        middle = between.rpc_sync().gradient(context_id)

    def loss(module: nn.Module, layer: Layer, r: int) -> Tensor:
        first = module(rows(r))
        return (first * module(layer(first))).sum()  # type: ignore[no-any-return]

    expected = averaged(network(), [lambda m, r=r: loss(m, Layer(), r) for r in range(size)])  # type: ignore[misc]
    alone = Layer()
    loss(network(), alone, rank).backward()
    agree(same([*found, middle], [*expected, alone.weight.grad]), (found, expected))


def test_one_rank_needs_what_another_computes(workers: list[str], rank: int, size: int) -> None:
    """One context goes through the replicas of all ranks: the last one's reduction ends after the first one's backward pass."""
    _mine.append(Parallel())
    everyone(None)
    if rank == 0:
        replicas = [rpc.rpc_sync(name, mine) for name in workers]
        with dist_autograd.context() as context_id:
            y = rows(0)
            for replica in replicas:
                y = replica.rpc_sync().forward(y)
            dist_autograd.backward(context_id, [y.square().sum()])
            found = [replica.rpc_sync().gradients(context_id) for replica in replicas]
        alone = network()
        y = rows(0)
        for _ in workers:
            y = alone(y)
        y.square().sum().backward()
        expected = [p.grad / size for p in alone.parameters()]  # type: ignore[operator]
        good = all(same(gradients, expected) for gradients in found)  # type: ignore[arg-type]
        everyone(None)
        agree(good, (found, expected))
    else:
        everyone(None)
        agree(True)
