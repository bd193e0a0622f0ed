"""Distributed autograd: the gradients of one process, in the context, on the worker that has the leaf (88)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.autograd import contexts
from tests.rpc.asking import HOWS, asked
from tests.rpc.layers import Layer, apply, near, one_process, through, x_of
from tests.support import agree


@pytest.mark.parametrize("what", ["function", "method"])
@pytest.mark.parametrize("how", HOWS)
def test_one_call(how: str, what: str, right: str, rank: int) -> None:
    layer, x = rpc.remote(right, Layer), x_of(rank)
    with dist_autograd.context() as context_id:
        if what == "function":
            y = asked(getattr(rpc, how), right, apply, (layer, x))
        else:
            y = asked(getattr(layer, how)().forward, x)
        dist_autograd.backward(context_id, [y.square().sum()])
        mine, theirs = dist_autograd.get_gradients(context_id)[x], layer.rpc_sync().gradient(context_id)
    expected = one_process(x, 1)
    good = near(mine, expected[0]) and near(theirs, expected[1][0])
    agree(good and x.grad is None and layer.rpc_sync().own_gradient() is None, (mine, theirs, expected))


def test_nested_calls_around_the_ring(workers: list[str], rank: int, size: int) -> None:
    """Each worker twice."""
    layers = [rpc.remote(workers[(rank + k) % size], Layer) for k in range(2 * size)]
    x = x_of(rank)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync(layers[0].owner(), through, (layers, x))
        dist_autograd.backward(context_id, [y.square().sum()])
        mine = dist_autograd.get_gradients(context_id)[x]
        theirs = [layer.rpc_sync().gradient(context_id) for layer in layers]
    gradient, weights = one_process(x, len(layers))
    agree(near(mine, gradient) and all(near(a, b) for a, b in zip(theirs, weights, strict=True)), (mine, gradient))


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


def test_retain_graph(right: str, rank: int) -> None:
    """Two passes add up; after one without retain_graph there is nothing left to go through."""
    layer, x = rpc.remote(right, Layer), x_of(rank)
    with dist_autograd.context() as context_id:
        loss = layer.rpc_sync().forward(x).square().sum()
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        dist_autograd.backward(context_id, [loss])
        found = dist_autograd.get_gradients(context_id)[x]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            dist_autograd.backward(context_id, [loss])
    agree(near(found, 2 * one_process(x, 1)[0]))


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("no gradient of this")


def refuse(x: Tensor) -> Tensor:
    return Refuses.apply(x)  # type: ignore[no-any-return]


def test_errors_surface_at_the_caller(right: str, workers: list[str], rank: int, size: int) -> None:
    x = x_of(rank)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync(right, refuse, (x,))
        for _ in range(3):  # nothing of it stays
            with pytest.raises(RuntimeError, match=r"Error on Node [0-9]+: no gradient of this") as caught:
                dist_autograd.backward(context_id, [y.sum()], retain_graph=True)
            assert "ArithmeticError" in str(caught.value)
        with pytest.raises(ArithmeticError, match="no gradient of this"):  # it is this worker's own
            dist_autograd.backward(context_id, [refuse(x).sum()])
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        dist_autograd.get_gradients(context_id)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        dist_autograd.backward(12345, [x.sum()])
    agree(True)


def test_a_received_tensor_changed_in_place(right: str, rank: int) -> None:
    """It is no leaf: in-place operations are recorded like any other."""
    layer, x = rpc.remote(right, Layer), x_of(rank)
    with dist_autograd.context() as context_id:
        y = layer.rpc_sync().forward(x)
        y.mul_(3)
        dist_autograd.backward(context_id, [y.square().sum()])
        found = dist_autograd.get_gradients(context_id)[x]
    agree(near(found, 9 * one_process(x, 1)[0]))


def test_what_torch_names_besides(workers: list[str], right: str, rank: int) -> None:
    """Programs look at contexts by torch's private names."""
    with pytest.raises(RuntimeError, match="retrieve the autograd context"):
        dist_autograd._current_context()
    with dist_autograd.context() as context_id:
        rpc.rpc_sync(right, torch.add, (torch.ones(2), 1))
        now = dist_autograd._current_context()
        good = [isinstance(now, dist_autograd.DistAutogradContext), now._context_id() == context_id]
        good += [dist_autograd._retrieve_context(context_id) is now, workers.index(right) in now._known_worker_ids()]
        good += [context_id >> 48 == rank, dist_autograd._get_max_id() >> 48 == rank]
        good += [int(dist_autograd._get_debug_info()["num_autograd_contexts"]) >= 1]
        dist_autograd._is_valid_context(context_id)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id"):
        dist_autograd._is_valid_context(context_id)
    made = dist_autograd._new_context()
    dist_autograd._release_context(made._context_id())
    agree(all(good) and contexts.current() is None, good)
