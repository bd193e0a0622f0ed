"""Distributed autograd: the gradients of one process, in the context, on the worker that has the leaf (88)."""

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.optim import DistributedOptimizer
from tests.rpc.layers import Layer, near, one_process, through, x_of
from tests.support import agree


def test_used_twice_and_not_at_all(right: str, workers: list[str], rank: int, size: int) -> None:
    """A tensor sent to two workers, an answer used twice, another that no loss depends on: it keeps nobody waiting (trap 88)."""
    other = workers[(rank + 2) % size]
    first, second, unused = rpc.remote(right, Layer), rpc.remote(other, Layer), rpc.remote(right, Layer)
    x = x_of(rank)
    with dist_autograd.context() as context_id:
        y, z = first.rpc_sync().forward(x), second.rpc_sync().forward(x)
        first.rpc_sync().forward(z)
        unused.rpc_sync().forward(y)
        u = second.rpc_sync().forward(y * z)
        dist_autograd.backward(context_id, [(u * y).sum() + (x * z).sum()])
        found = [
            dist_autograd.get_gradients(context_id)[x],
            *(m.rpc_sync().gradient(context_id) for m in (first, second, unused)),
        ]
    a, b, plain = Layer(), Layer(), x.detach().requires_grad_()
    y, z = a(plain), b(plain)
    ((b(y * z) * y).sum() + (plain * z).sum()).backward()
    good = near(found[0], plain.grad) and near(found[1], a.weight.grad) and near(found[2], b.weight.grad) and found[3] is None
    agree(good, found)


def chain(x: Tensor, to: list[str], n: int) -> Tensor:
    return x if n == 0 else rpc.rpc_sync(to[n % len(to)], doubled, (x, x * 0.5))


def doubled(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def test_a_long_chain_is_walked_once(workers: list[str], rank: int) -> None:
    """Each answer is sent on twice in one message, 40 times: gradients must not be computed 2^40 times."""
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    began = time.monotonic()
    with dist_autograd.context() as context_id:
        y = x
        for n in range(1, 41):
            y = chain(y, workers, n)
        dist_autograd.backward(context_id, [y.sum()])
        found = dist_autograd.get_gradients(context_id)[x]
    agree(torch.allclose(found, torch.full_like(found, 1.5**40)), found)
    agree(time.monotonic() - began < 30, time.monotonic() - began)


def test_several_contexts_at_once(right: str, rank: int) -> None:
    """From several threads; what one computes never shows in another, and none touches .grad."""
    layer = rpc.remote(right, Layer)
    found: dict[int, Any] = {}

    def run(k: int) -> None:
        x = x_of(10 * rank + k)
        for _ in range(3):
            with dist_autograd.context() as context_id:
                y = layer.rpc_sync().forward(x)
                dist_autograd.backward(context_id, [(y.square() * (k + 1)).sum()])
                found[k] = (x, dist_autograd.get_gradients(context_id)[x], layer.rpc_sync().gradient(context_id))

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrong = []
    for k, (x, mine, theirs) in sorted(found.items()):
        gradient, (weight,) = one_process(x, 1)
        if not (near(mine, gradient * (k + 1)) and near(theirs, weight * (k + 1))):
            wrong.append(k)
    agree(len(found) == 4 and not wrong, wrong)


class _Meet(torch.autograd.Function):
    """Its backward waits until that of the other pass has come as far."""

    meeting = threading.Barrier(2, timeout=10)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Meet.meeting.wait()
        return gradient


def test_two_passes_at_once(right: str, rank: int) -> None:
    """In one context, through one message: each keeps its own gradients."""
    layer, x = rpc.remote(right, Layer), x_of(rank)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    with dist_autograd.context() as context_id:
        met = _Meet.apply(factor)  # type: ignore[no-untyped-call]
        square = layer.rpc_sync().forward(x).square().sum()  # made after it, so that its backward runs before
        threads = [
            threading.Thread(target=dist_autograd.backward, args=(context_id, [n * square * met]), kwargs={"retain_graph": True})
            for n in (1, 3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        gradient = dist_autograd.get_gradients(context_id)[x]
    expected, _ = one_process(x, 1)
    agree(near(gradient, 4 * expected), (gradient, expected))


def test_a_received_tensor_changed_in_place(right: str, rank: int) -> None:
    """It is no leaf: in-place operations are recorded like any other."""
    layer, x = rpc.remote(right, Layer), x_of(rank)
    with dist_autograd.context() as context_id:
        y = layer.rpc_sync().forward(x)
        y.mul_(3)
        dist_autograd.backward(context_id, [y.square().sum()])
        found = dist_autograd.get_gradients(context_id)[x]
    agree(near(found, 9 * one_process(x, 1)[0]))


# -- whose memory gradients of a context are, and what hooks see of them


class _GivesAway(torch.autograd.Function):
    """Its gradient is a tensor that the program goes on to use."""

    kept = torch.full((4,), 2.0)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _GivesAway.kept


def test_gradients_that_others_hold(workers: list[str], rank: int) -> None:
    """What get_gradients has returned, what a hook has kept, what a Function has returned: nothing adds to them."""
    seen: list[Tensor] = []
    x = torch.ones(4, requires_grad=True)
    x.register_hook(seen.append)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [(3 * x).sum()])
        first = dist_autograd.get_gradients(context_id)[x]
        dist_autograd.backward(context_id, [(5 * x).sum()])
        dist_autograd.backward(context_id, [_GivesAway.apply(x).sum()])  # type: ignore[no-untyped-call]
        dist_autograd.backward(context_id, [(7 * x).sum()])
        last = dist_autograd.get_gradients(context_id)[x]
    values = [float(t[0]) for t in (first, *seen, _GivesAway.kept, last)]
    agree(values == [3, 3, 5, 2, 7, 2, 17], values)


class _Notes(torch.autograd.Function):
    """Where the memory of the gradient is that it returns."""

    where = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Notes.where = (gradient._values() if gradient.is_sparse else gradient).data_ptr()
        return gradient


@pytest.mark.parametrize("kind", ["dense", "embedding", "embedding_bag"])
def test_gradients_are_handed_on(kind: str, workers: list[str]) -> None:
    """Without a copy, where the engine has made them for nobody else; a program that overwrites its indices changes nothing."""
    x, indices = torch.ones(10, 3, requires_grad=True), torch.tensor([1, 2, 2])
    with dist_autograd.context() as context_id:
        y = _Notes.apply(x)  # type: ignore[no-untyped-call]
        if kind == "dense":
            y = y[1:3] * 1
        elif kind == "embedding":
            y = torch.nn.functional.embedding(indices, y, sparse=True)
        else:
            y = torch.nn.functional.embedding_bag(indices, y, torch.tensor([0, 1]), mode="sum", sparse=True)
        dist_autograd.backward(context_id, [(y * 3).sum()])
        found = dist_autograd.get_gradients(context_id)[x]
    values = found._values() if found.is_sparse else found
    indices.fill_(9)
    rows = found.to_dense().sum(dim=1).nonzero().flatten().tolist()
    agree(values.data_ptr() == _Notes.where and rows == [1, 2], (values.data_ptr(), _Notes.where, rows))


def test_hooks_of_leaves_run_once(right: str, workers: list[str], rank: int, size: int) -> None:
    """With the whole gradient, though it arrives in two parts, one after the other."""
    layer, between = rpc.remote(right, Hooked), rpc.remote(workers[(rank + 2) % size], Layer)
    with dist_autograd.context() as context_id:
        y = layer.rpc_sync().forward(x_of(rank))
        z = layer.rpc_sync().forward(between.rpc_sync().forward(y))
        dist_autograd.backward(context_id, [(y * z).sum()])
        found, counts = layer.rpc_sync().gradient(context_id), layer.rpc_sync().seen()
    alone, plain = Hooked(), Layer()
    y = alone(x_of(rank))
    (y * alone(plain(y))).sum().backward()
    agree(near(found, alone.weight.grad) and counts == alone.seen() == ["tensor", "before", "after"], (found, counts))


class Hooked(Layer):
    """Its tensor hook takes no part of a gradient for the whole: it halves what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        node = self.weight.expand_as(self.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_prehook(lambda gradients: self.calls.append("before"))  # type: ignore[union-attr,arg-type,return-value]
        node.register_hook(lambda *gradients: self.calls.append("after"))  # type: ignore[union-attr]
        self.weight.register_hook(self._clip)
        self.node = node

    def _clip(self, gradient: Tensor) -> Tensor:
        self.calls.append("tensor")
        return gradient / gradient.norm()

    def seen(self) -> list[str]:
        return self.calls


# -- DistributedOptimizer: the steps of one process, with the gradients of the context (traps 87, 88)


OWN_TESTS = {"Optimizer", "LBFGS", "SparseAdam"}  # the base; wants a closure; wants sparse gradients
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in OWN_TESTS
)
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.1, "amsgrad": True}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name: str, workers: list[str], rank: int, size: int) -> None:
    """Three steps over parameters on every worker equal one process; .grad stays what it was."""
    kind, options = getattr(torch.optim, name), OPTIONS.get(name, {})
    layers = [rpc.remote(worker, Layer, (k,)) for k, worker in enumerate(workers)]
    optimizer = DistributedOptimizer(kind, [p for layer in layers for p in layer.rpc_sync().parameter_rrefs()], **options)
    modules = [Layer(k) for k in range(size)]
    plain = kind([module.weight for module in modules], **options)
    for step in range(3):
        x = x_of(100 * rank + step)
        with dist_autograd.context() as context_id:
            y = rpc.rpc_sync(layers[0].owner(), through, (layers, x))
            dist_autograd.backward(context_id, [y.square().sum()])
            optimizer.step(context_id)
        y = x.detach()
        for module in modules:
            y = module(y)
        plain.zero_grad()
        y.square().sum().backward()
        plain.step()
    found = [layer.rpc_sync().parameter_rrefs()[0].to_here() for layer in layers]
    good = all(near(a.detach(), m.weight.detach()) for a, m in zip(found, modules, strict=True))
    agree(good and all(layer.rpc_sync().own_gradient() is None for layer in layers), found)
