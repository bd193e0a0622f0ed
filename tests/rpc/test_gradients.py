"""Whose memory gradients of a context are, and what hooks see of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from tests.rpc.layers import Layer, near, x_of
from tests.support import agree


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
