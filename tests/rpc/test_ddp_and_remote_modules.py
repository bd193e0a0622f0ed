"""DistributedDataParallel around, beside and inside remote modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.rpc.rref import RRef
from tests.rpc.layers import Layer, near
from tests.rpc.replicas import MODES, averaged, loss_of, network, rows, same
from tests.support import agree, everyone

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Grad strides"),
]


class Hybrid(nn.Module):
    """A remote layer between two local ones."""

    def __init__(self, remote: RRef[Layer]) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.before, self.after = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        self.remote = remote

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.remote.rpc_sync().forward(self.before(x)))  # type: ignore[no-any-return]


def plain_hybrid() -> nn.Sequential:
    torch.manual_seed(9)
    before, after = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
    return nn.Sequential(before, Layer(), after)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_around_and_beside_a_remote_module(where: str, right: str, rank: int, size: int) -> None:
    """DDP around everything, or around the last layer only; the remote layer's gradients are of one caller, never reduced."""
    remote = rpc.remote(right, Layer)
    model = Hybrid(remote)
    parallel: Any = model
    if where == "outside":
        parallel = DistributedDataParallel(model)
    else:
        model.after = DistributedDataParallel(model.after)  # type: ignore[assignment]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss_of(0, rank)(parallel)])
        gradients = dist_autograd.get_gradients(context_id)
        found = [gradients[p] for p in model.parameters()]
        theirs = remote.rpc_sync().gradient(context_id)
    plain = plain_hybrid()
    mean = averaged(plain, [loss_of(0, r) for r in range(size)])
    own = averaged(plain, [loss_of(0, rank)])
    expected = [*(mean if where == "outside" else own)[:2], *mean[3:]]
    agree(same([*found, theirs], [*expected, own[2]]), (found, expected))


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
