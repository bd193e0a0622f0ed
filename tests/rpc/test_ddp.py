"""DistributedDataParallel in a distributed autograd context: the context gets the reduced gradients, ``.grad`` stays."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import mpicoll.autograd as dist_autograd
from tests.rpc.layers import Layer, near
from tests.rpc.replicas import MODES, averaged, in_context, loss_of, network, rows, same
from tests.support import agree

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Grad strides"),
]


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


def test_sparse(workers: list[str], rank: int, size: int) -> None:
    module = nn.EmbeddingBag(10, 3, sparse=True)
    nn.init.ones_(module.weight)
    parallel = DistributedDataParallel(module)
    indices = [torch.tensor([r, r + 1, 2 * r, 3]) for r in range(size)]
    expected = averaged(module, [lambda m, i=i: m(i, torch.tensor([0, 2])).sum() for i in indices])  # type: ignore[misc]
    for _ in range(2):
        found = in_context(module, lambda: parallel(indices[rank], torch.tensor([0, 2])).sum())
        agree(same(found, expected), (found, expected))


def test_uneven_inputs(workers: list[str], rank: int, size: int) -> None:
    """Ranks whose data end early join, and count as zeros."""
    module = network()
    parallel = DistributedDataParallel(module)
    good = []
    with parallel.join():
        for step in range(rank + 1):
            expected = averaged(module, [loss_of(step, r) for r in range(size) if r >= step])
            expected = [None if g is None else g * (size - step) / size for g in expected]
            good.append(same(in_context(module, lambda step=step: loss_of(step, rank)(parallel)), expected))  # type: ignore[misc]
    agree(all(good), good)


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
