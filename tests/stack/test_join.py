"""torch's Join with Joinables of one's own: ranks with more inputs than others, whose collectives the others shadow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tests.support import agree, everyone

SECTION = "State"


class ShadowHook(JoinHook):
    """What a rank that is through does while others go on, and what it does at the end."""

    def __init__(self, mean: RunningMean, keep: bool) -> None:
        self.mean, self.keep = mean, keep

    def main_hook(self) -> None:
        self.mean.shadowed += 1
        self.mean.collect(torch.zeros(2))

    def post_hook(self, is_last_joiner: bool) -> None:
        """The last to join have seen everything: the highest of them tells the others."""
        mean = self.mean
        mean.last = is_last_joiner
        if not self.keep:
            return
        here = dist.get_rank(mean.group)
        teller = torch.tensor([here if is_last_joiner else -1])
        dist.all_reduce(teller, op=dist.ReduceOp.MAX, group=mean.group)
        dist.broadcast(mean.sums, group_src=int(teller), group=mean.group)


class RunningMean(Joinable):
    """The mean of what all ranks have given, however many inputs each has."""

    def __init__(self, group: Any = None, async_op: bool = False) -> None:
        super().__init__()
        self.group = dist.group.WORLD if group is None else group
        self.async_op = async_op
        self.sums = torch.zeros(2)  # of the inputs, and how many they were
        self.steps = self.shadowed = 0
        self.last: bool | None = None
        self.told: dict[str, Any] = {}

    def __call__(self, value: float) -> None:
        Join.notify_join_context(self)
        self.steps += 1
        self.collect(torch.tensor([value, 1.0]))

    def collect(self, share: Tensor) -> None:
        """Two collectives, so that hooks out of order would mix them up."""
        work = dist.all_reduce(share, group=self.group, async_op=self.async_op)
        most = share.clone() if not self.async_op else torch.zeros(2)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        if work is not None:
            work.wait()
        self.sums += share

    def join_hook(self, **kwargs: Any) -> JoinHook:
        self.told = kwargs
        return ShadowHook(self, kwargs.get("keep", True))

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


def inputs(rank: int) -> list[float]:
    """Rank r has 2r + 1 of them."""
    return [rank + 0.5 * i for i in range(2 * rank + 1)]


def expected(ranks: list[int]) -> list[float]:
    values = [value for rank in ranks for value in inputs(rank)]
    return [sum(values), float(len(values))]


@pytest.mark.feature("Join with a Joinable of one's own, uneven inputs")
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_uneven_inputs(async_op: bool, rank: int, size: int) -> None:
    """Everybody's inputs count, and all ranks know the result; a rank shadows as many steps as it is short of."""
    mean = RunningMean(async_op=async_op)
    with Join([mean]):
        for value in inputs(rank):
            mean(value)
    right = mean.sums.tolist() == expected(list(range(size))) and mean.last == (rank == size - 1)
    agree(right and mean.shadowed == 2 * (size - 1 - rank), (mean.sums, mean.last, mean.shadowed))


@pytest.mark.feature("Join with several Joinables, and what is passed to their hooks")
def test_several(rank: int, size: int) -> None:
    """Hooks run in the order of the list, which is the order of the collectives in a step; one of them is used by turns."""
    first, second = RunningMean(), RunningMean(async_op=True)
    with Join([first, second], keep=rank >= 0, word="given"):
        for value in inputs(rank):
            first(value)
            second(-value)
    total, count = expected(list(range(size)))
    told = first.told == second.told == {"keep": True, "word": "given"}
    agree(first.sums.tolist() == [total, count] and second.sums.tolist() == [-total, count] and told, (first.sums, second.sums))


@pytest.mark.feature("Join in subgroups, two of them at a time")
@pytest.mark.min_ranks(2)
def test_in_subgroups(rank: int, size: int) -> None:
    """Even and odd ranks join among themselves, in different numbers of steps."""
    halves = [list(range(start, size, 2)) for start in range(2)]
    groups = [dist.new_group(ranks) for ranks in halves]
    mine, group = halves[rank % 2], groups[rank % 2]
    mean = RunningMean(group)
    with Join([mean]):
        for value in inputs(rank):
            mean(value)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group(group)
    agree(mean.sums.tolist() == expected(mine) and total.item() == size, mean.sums)


@pytest.mark.feature("Join: throw_on_early_termination, errors inside, not enabled")
@pytest.mark.min_ranks(2)
def test_throws_on_early_termination(rank: int, size: int) -> None:
    """The first rank to run out makes all of them raise, in the same step; the group goes on."""
    mean, said = RunningMean(), ""
    try:
        with Join([mean], throw_on_early_termination=True):
            for value in inputs(rank):
                mean(value)
    except RuntimeError as error:
        said = str(error)
    words = "Rank 0 exhausted all inputs" if rank == 0 else "at least one rank that exhausted inputs"
    total = torch.ones(1)
    dist.all_reduce(total)
    agree(words in said and mean.steps == 1 and total.item() == size, (said, mean.steps))


@pytest.mark.feature("Join: throw_on_early_termination, errors inside, not enabled")
def test_errors_pass_through(rank: int, size: int) -> None:
    """An error on all ranks leaves the context at once, without a hook, and the group goes on."""
    mean, said = RunningMean(), ""
    try:
        with Join([mean]):
            mean(1.0)
            raise ZeroDivisionError("inside")
    except ZeroDivisionError as error:
        said = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    agree(said == "inside" and mean.last is None and total.item() == size, (said, mean.last))


@pytest.mark.feature("Join: throw_on_early_termination, errors inside, not enabled")
def test_not_enabled(rank: int, size: int) -> None:
    """enable=False with as many inputs everywhere: no collective more than the program's own."""
    mean = RunningMean()
    with Join([mean], enable=False):
        for value in (1.0, 2.0):
            mean(value)
    sums = everyone(mean.sums.tolist())
    agree(sums == [[3.0 * size, 2.0 * size]] * size and mean.last is None, sums)
