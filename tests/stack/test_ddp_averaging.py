"""Averaging models in place of gradients, and optimizers inside the backward pass, beside a simulation of all ranks in one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from tests.stack.replicas import apart, batch, close, loss_of, network, same_bits, sgd, share, train
from tests.support import agree

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:When period is 1")

feature = pytest.mark.feature
STEPS = 7


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(0)


class Simulated:
    """All ranks' models in one process, with an optimizer each; ``places``: their numbers."""

    def __init__(self, size: int) -> None:
        self.models = [network() for _ in range(size)]
        self.optimizers = [sgd(model.parameters()) for model in self.models]

    def backward(self, step: int) -> None:
        x, y = batch(step, len(self.models))
        for r, model in enumerate(self.models):
            model.zero_grad()
            loss_of(model(share(x, r)), share(y, r)).backward()

    def average_gradients(self, places: Sequence[int]) -> None:
        for column in zip(*(self.models[r].parameters() for r in places), strict=True):
            average = mean([p.grad for p in column])  # type: ignore[misc]
            for p in column:
                p.grad = average.clone()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def average_models(self, places: Sequence[int]) -> None:
        for column in zip(*(self.models[r].parameters() for r in places), strict=True):
            average = mean([p.detach() for p in column])
            for p in column:
                p.copy_(average)


def pairs_of(size: int) -> list[list[int]]:
    return [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]


@feature("Model averaging: PeriodicModelAverager")
@pytest.mark.parametrize(("period", "warmup"), [(1, 0), (3, 2)])
def test_periodic(period: int, warmup: int, rank: int, size: int) -> None:
    """Every rank trains by itself; after the warm-up the models meet every ``period`` steps."""
    model, simulated = network(), Simulated(size)
    optimizer, averager = sgd(model.parameters()), PeriodicModelAverager(period, warmup)
    for step in range(STEPS):
        train(model, 1, size, rank, optimizer, first=step)
        averager.average_parameters(model.parameters())
        simulated.backward(step)
        simulated.step()
        if step >= warmup and (step - warmup) % period == 0:
            simulated.average_models(range(size))
    agree(close(model, simulated.models[rank]), apart(model, simulated.models[rank]))


@feature("Model averaging: HierarchicalModelAverager")
@pytest.mark.ranks(4, 8)
def test_hierarchical(rank: int, size: int) -> None:
    """Neighbours meet every 2 steps, fours every 4, all every 6; the widest that is due wins."""
    levels = [(2, 2), (4, size // 2), (6, size)] if size > 4 else [(2, 2), (4, size)]
    model, simulated = network(), Simulated(size)
    optimizer = sgd(model.parameters())
    averager = HierarchicalModelAverager(OrderedDict(levels), warmup_steps=1)
    for step in range(STEPS):
        train(model, 1, size, rank, optimizer, first=step)
        averager.average_parameters(optimizer.param_groups)
        simulated.backward(step)
        simulated.step()
        width = next((width for period, width in reversed(levels) if step % period == 0), 0) if step >= 1 else 0
        for first in range(0, size, width) if width else ():
            simulated.average_models(range(first, first + width))
    agree(close(model, simulated.models[rank]), apart(model, simulated.models[rank]))


@feature("DDP hooks: post_localSGD, with PostLocalSGDOptimizer")
@pytest.mark.parametrize("neighbours", [True, False], ids=["gradients-of-neighbours", "own-gradients"])
def test_post_local_sgd(neighbours: bool, rank: int, size: int) -> None:
    """DDP for two steps; then gradients are averaged among neighbours, or not at all, and models among all, now and then."""
    from torch.distributed.optim import PostLocalSGDOptimizer

    start, period = 2, 2
    pairs = pairs_of(size)
    groups = [dist.new_group(ranks) for ranks in pairs]
    model, simulated = network(), Simulated(size)
    parallel = DistributedDataParallel(model)
    state = PostLocalSGDState(None, groups[rank // 2], start, post_local_gradient_allreduce=neighbours)
    parallel.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period, warmup_steps=start)
    optimizer = PostLocalSGDOptimizer(sgd(model.parameters()), averager)
    for step in range(STEPS):
        train(parallel, 1, size, rank, optimizer, first=step)
        simulated.backward(step)
        if step < start:
            simulated.average_gradients(range(size))
        elif neighbours:
            for ranks in pairs:
                simulated.average_gradients(ranks)
        simulated.step()
        if step >= start and (step - start) % period == 0:
            simulated.average_models(range(size))
    saved = optimizer.state_dict()
    optimizer.averager.step = 0
    optimizer.load_state_dict(saved)
    dist.destroy_process_group(groups[rank // 2])
    far = apart(model, simulated.models[rank])
    agree(not far and optimizer.averager.step == STEPS, (far, optimizer.averager.step))


@feature("Optimizer in the backward pass: register_post_accumulate_grad_hook, with one's own all_reduce")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_optimizer_in_backward(async_op: bool, rank: int, size: int) -> None:
    """Each parameter's gradient is averaged, used and dropped as soon as it is there; or all are under way at once."""
    model, reference = network(), network()
    steppers: dict[Any, torch.optim.Optimizer] = {p: sgd([p]) for p in model.parameters()}
    under_way: list[tuple[nn.Parameter, Any]] = []

    def reduce(parameter: Any) -> None:
        work = dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=async_op)
        under_way.append((parameter, work))
        if not async_op:
            finish()

    def finish() -> None:
        for parameter, work in under_way:
            if work is not None:
                work.wait()
            steppers[parameter].step()
            parameter.grad = None
        under_way.clear()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(reduce)
    for step in range(3):
        x, y = batch(step, size)
        loss_of(model(share(x, rank)), share(y, rank)).backward()
        finish()
    train(reference, 3, size)
    agree(same_bits(model) and close(model, reference), apart(model, reference))
