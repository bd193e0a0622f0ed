"""Uneven inputs: ranks that are through shadow the collectives of the others, for DDP and for Joinables of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tests.stack.sharded import (
    SMALL,
    adam,
    backward,
    ddp,
    differences,
    network,
    same_bits,
    sgd,
    train,
    zero,
)
from tests.support import agree

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:Detected uneven inputs", "ignore:.*TorchScript:DeprecationWarning"
)


class ShadowHook(JoinHook):
    """What a rank that is through does while others go on, and at the end: the highest of the last to join tells the others."""

    def __init__(self, mean: RunningMean) -> None:
        self.mean = mean

    def main_hook(self) -> None:
        self.mean.collect(torch.zeros(2))

    def post_hook(self, is_last_joiner: bool) -> None:
        mean = self.mean
        mean.last = is_last_joiner
        teller = torch.tensor([dist.get_rank(mean.group) if is_last_joiner else -1])
        dist.all_reduce(teller, op=dist.ReduceOp.MAX, group=mean.group)
        dist.broadcast(mean.sums, group_src=int(teller), group=mean.group)


class RunningMean(Joinable):
    """The mean of what all ranks have given, however many inputs each has."""

    join_device = torch.device("cpu")
    join_process_group: Any = None

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = self.join_process_group = dist.group.WORLD if group is None else group
        self.sums = torch.zeros(2)  # of the inputs, and how many they were
        self.last: bool | None = None

    def __call__(self, value: float) -> None:
        Join.notify_join_context(self)
        self.collect(torch.tensor([value, 1.0]))

    def collect(self, share: Tensor) -> None:
        """Two collectives, so that hooks out of order would mix them up."""
        work: Any = dist.all_reduce(share, group=self.group, async_op=True)
        dist.all_reduce(torch.zeros(2), op=dist.ReduceOp.MAX, group=self.group)
        work.wait()
        self.sums += share

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return ShadowHook(self)


def inputs(rank: int) -> list[float]:
    """Rank r has 2r + 1 of them."""
    return [rank + 0.5 * i for i in range(2 * rank + 1)]


@pytest.mark.parametrize("parts", [pytest.param(1, id="world"), pytest.param(2, marks=pytest.mark.min_ranks(2), id="halves")])
def test_joinables_of_ones_own(parts: int, rank: int, size: int) -> None:
    """Hooks run in the order of the list, which is the order of the collectives in a step; a rank shadows the steps it lacks."""
    members = [list(range(start, size, parts)) for start in range(parts)]
    group, mine = [dist.new_group(ranks) for ranks in members][rank % parts], members[rank % parts]
    first, second = RunningMean(group), RunningMean(group)
    with Join([first, second]):
        for value in inputs(rank):
            first(value)
            second(-value)
    dist.all_reduce(total := torch.ones(1))
    dist.destroy_process_group(group)
    values = [value for r in mine for value in inputs(r)]
    right = first.sums.tolist() == [sum(values), len(values)] and second.sums.tolist() == [-sum(values), len(values)]
    agree(right and first.last == (rank == mine[-1]) and total.item() == size, (first.sums, second.sums, first.last))


@pytest.mark.parametrize("what", ["error", pytest.param("early", marks=pytest.mark.min_ranks(2))])
def test_leaving_early(what: str, rank: int, size: int) -> None:
    """The first rank to run out makes all raise in the same step; an error leaves without a hook. The group goes on."""
    mean, said = RunningMean(), ""
    try:
        with Join([mean], throw_on_early_termination=what == "early"):
            for value in inputs(rank):
                mean(value)
                if what == "error":
                    raise RuntimeError("inside")
    except RuntimeError as error:
        said = str(error)
    early = "Rank 0 exhausted all inputs" if rank == 0 else "at least one rank that exhausted inputs"
    dist.all_reduce(total := torch.ones(1))
    right = (early if what == "early" else "inside") in said and mean.last is None
    agree(right and mean.sums[1].item() == size and total.item() == size, (said, mean.last, mean.sums))


def batches_of(rank: int) -> int:
    """The last rank has most."""
    return 2 + rank


@pytest.mark.parametrize("divide_by_world", [True, False], ids=["divide-by-world", "divide-by-active"])
def test_model_join(divide_by_world: bool, rank: int, size: int) -> None:
    """model.join(): the last step is the last rank's alone, and the weights that it ends with are everybody's, as on Gloo."""
    trained = []
    for group in (dist.group.WORLD, gloo := dist.new_group(backend="gloo")):
        parallel = ddp(network(), group, bucket_cap_mb=SMALL)
        with parallel.join(divide_by_initial_world_size=divide_by_world):
            train(parallel, sgd(parallel.parameters()), range(batches_of(rank)), rank, size)
        trained.append(list(parallel.parameters()))
    dist.destroy_process_group(gloo)
    bad = differences(*trained)
    agree(same_bits(trained[0]) and not bad, bad)


def test_join_of_several(rank: int, size: int) -> None:
    """As Gloo does it, within rounding: a rank that is through goes on to step and to hand out its share of the
    parameters, with the gradients of its last batch, since DDP gives it no others.
    """
    trained, counts = [], []
    for group in (dist.group.WORLD, gloo := dist.new_group(backend="gloo")):
        mean, parallel = RunningMean(group), ddp(network(), group)
        optimizer = zero(parallel.parameters(), adam, process_group=group)
        with Join([mean, parallel, optimizer]):
            for step in range(batches_of(rank)):
                mean(1.0)
                optimizer.zero_grad(set_to_none=False)
                backward(parallel, step, rank, size)
                optimizer.step()
        trained.append(list(parallel.parameters()))
        counts.append(mean.sums.tolist())
    dist.destroy_process_group(gloo)
    total = float(sum(batches_of(r) for r in range(size)))
    bad = differences(*trained, 1e-9)
    agree(same_bits(trained[0]) and counts == [[total, total]] * 2 and not bad, (counts, bad))
