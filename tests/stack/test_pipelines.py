"""torch.distributed.pipelining with PipelineStage: what may travel between stages, and how a stage learns its shapes.

Everything is compared with one process that runs all parts on the same micro-batches.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    stage,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.functional import mse_loss

from tests.stack import pipes
from tests.stack.record import refused_alike
from tests.support import agree, everyone, needs_sort_ranks

SECTION = "Pipelines"

# Before 2.13 every activation had to have a gradient, was received as a contiguous one, and all ranks had to give shapes or none.
since_2_13 = pytest.mark.skipif(not hasattr(stage, "InferenceMode"), reason="needs torch >= 2.13")
both = pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])


def check(
    kind: Any, parts: list[nn.Module], data: list[pipes.Batch], rank: int, size: int, loss: pipes.Loss = mse_loss, **more: Any
) -> None:
    """Trains ``parts``, one per rank, both ways and agrees.

    more: tensors are keyword arguments of every part; ``atol``; ``stages``: what makes this rank's stage.
    """
    atol, make = more.pop("atol", 1e-12), more.pop("stages", pipes.stages)
    mine = pipes.own(parts, [rank])
    expected = pipes.alone(parts, data, size + 1, loss, **more)
    schedule = kind(make(mine, size)[0], size + 1, loss_fn=loss)
    wrong = pipes.differences(pipes.piped(schedule, mine, size, data, **more), expected, mine, size, atol)
    agree(not wrong, wrong)


# -- shapes ------------------------------------------------------------------------------------------------------------


class Text(nn.Module):
    """Token numbers (rows, length) of int64 become vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.table(tokens))


def widths(size: int) -> list[int]:
    return [3 + index % 4 for index in range(size)]


def text_parts(size: int) -> list[nn.Module]:
    """The activation has another width behind each part."""
    return [Text(3)] + [nn.Linear(a, b, dtype=torch.float64) for a, b in zip(widths(size), widths(size)[1:], strict=False)]


@pytest.mark.feature("shapes inferred at run time, given, or given by some ranks only")
@pytest.mark.parametrize("given", ["none", "all", pytest.param("some", marks=since_2_13)])
@both
def test_shapes(kind: Any, given: str, rank: int, size: int) -> None:
    """Shapes that the stages tell each other by objects, and then tensors of these, different between each two stages."""
    rows, length = 2, 5
    data: list[pipes.Batch] = [
        (torch.randint(11, (rows * (size + 1), length)), torch.randn(rows * (size + 1), length, widths(size)[-1]).double())
        for _ in range(2)
    ]

    def make(mine: dict[int, nn.Module], count: int) -> list[PipelineStage]:
        if given == "none" or (given == "some" and rank % 2):
            return pipes.stages(mine, count)
        before = torch.empty(rows, length, dtype=torch.int64, device="meta")
        if rank:
            before = torch.empty(rows, length, widths(size)[rank - 1], dtype=torch.float64, device="meta", requires_grad=True)
        after = torch.empty(rows, length, widths(size)[rank], dtype=torch.float64, device="meta", requires_grad=True)
        return pipes.stages(mine, count, input_args=(before,), output_args=(after,))

    check(kind, text_parts(size), data, rank, size, stages=make)


# -- what travels ------------------------------------------------------------------------------------------------------


@pytest.mark.feature("activations in float32, bfloat16, float16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@both
def test_dtypes(kind: Any, dtype: torch.dtype, rank: int, size: int) -> None:
    """The same operations on the same numbers: equal to the last bit, or a message was changed on its way."""
    parts, data = pipes.linear_parts(size, dtype=dtype), pipes.batches(2, 2 * (size + 1), 4, dtype)
    check(kind, parts, data, rank, size, atol=0)


class Layout(nn.Module):
    """Puts out an activation that is not contiguous: of a kind that torch keeps on the other side, too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(6, 6, dtype=torch.float64), kind

    def forward(self, x: Tensor) -> Tensor:  # (n, 6, 6, 6)
        x = torch.tanh(self.linear(x))
        if self.kind == "channels_last":
            return x.contiguous(memory_format=torch.channels_last)
        if self.kind == "transposed":
            return x.transpose(1, 3)
        return torch.stack([x, x * 2], -1)[..., 1]  # every other element of its storage


@pytest.mark.feature("activations that are not contiguous")
@pytest.mark.parametrize("layout", ["transposed", "channels_last", pytest.param("every_other", marks=since_2_13)])
@both
def test_layouts(kind: Any, layout: str, rank: int, size: int) -> None:
    """torch receives into a tensor with the sender's strides (from 2.13 on): memory order is not the order of elements."""
    parts: list[nn.Module] = [Layout(layout) for _ in range(size)]
    data: list[pipes.Batch] = [(torch.randn(size + 1, 6, 6, 6).double(), torch.randn(size + 1, 6, 6, 6).double())] * 2
    check(kind, parts, data, rank, size)


class Two(nn.Module):
    """(x, y) -> (x', y'), of different shapes, both scaled by a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, y: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.a(x)) * by + y.mean(1, keepdim=True), self.b(y) * by


def loss_of_two(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return mse_loss(output[0], target) + output[1].square().mean()


@pytest.mark.feature("several inputs and outputs, keyword arguments")
@both
def test_tuples_and_keywords(kind: Any, rank: int, size: int) -> None:
    """Two messages per micro-batch and direction between the same ranks, told apart by nothing but their order."""
    rows = 2 * (size + 1)
    data: list[pipes.Batch] = [
        ((torch.randn(rows, 4).double(), torch.randn(rows, 3).double()), torch.randn(rows, 4).double()) for _ in range(2)
    ]
    parts: list[nn.Module] = [Two() for _ in range(size)]
    check(kind, parts, data, rank, size, loss=loss_of_two, by=torch.rand(rows, 1).double())


class Masked(nn.Module):
    """Hands on beside the activation what needs no gradient: a mask of bool and numbers of int64."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4, dtype=torch.float64), last

    def forward(self, x: Tensor, mask: Tensor, numbers: Tensor) -> Any:
        x = torch.tanh(self.linear(x)).masked_fill(mask, 0.5) * numbers
        return x if self.last else (x, mask.roll(1, 1), numbers + 1)


@pytest.mark.feature("integers and masks beside the activations")
@since_2_13
@both
def test_what_needs_no_gradient(kind: Any, rank: int, size: int) -> None:
    """Forward there are three messages, backward one; a rank that waits for more never ends."""
    rows = 2 * (size + 1)
    inputs = (torch.randn(rows, 4).double(), torch.rand(rows, 4) < 0.5, torch.randint(1, 3, (rows, 1)))
    data: list[pipes.Batch] = [(inputs, torch.randn(rows, 4).double())] * 2
    check(kind, [Masked(index == size - 1) for index in range(size)], data, rank, size)


@since_2_13
@pytest.mark.feature("the batch in another dimension (`TensorChunkSpec`)")
def test_batch_in_another_dimension(rank: int, size: int) -> None:
    """Inputs are cut along dim 1 and the outputs joined along it."""
    parts, micro = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(size)], 3
    x = torch.randn(2, 2 * micro, 4, dtype=torch.float64)
    mine = pipes.own(parts, [rank])
    schedule = ScheduleGPipe(
        pipes.stages(mine, size)[0], micro, args_chunk_spec=(TensorChunkSpec(1),), output_merge_spec=TensorChunkSpec(1)
    )
    with torch.no_grad():
        got = schedule.step(*([x] if rank == 0 else []))
        expected = nn.Sequential(*parts)(x)
    agree(rank < size - 1 or pipes.close(got, expected), (got, expected))


# -- forward only ------------------------------------------------------------------------------------------------------


@pytest.mark.feature("`schedule.eval`, in turn with steps")
@pytest.mark.parametrize("order", ["step eval step eval", pytest.param("eval step eval step", marks=since_2_13)])
@pytest.mark.parametrize("per_rank", [1, pytest.param(2, marks=pytest.mark.min_ranks(2))])
def test_eval_between_steps(per_rank: int, order: str, rank: int, size: int) -> None:
    """A switch of mode makes new buffers (since 2.13): what a step has left under way would land in the old ones."""
    count, micro = per_rank * size, 2 * size
    parts = pipes.linear_parts(count)
    mine = pipes.own(parts, pipes.places(rank, size, per_rank))
    held = pipes.stages(mine, count)
    schedule = Schedule1F1B(held[0], micro, mse_loss) if per_rank == 1 else ScheduleInterleaved1F1B(held, micro, mse_loss)
    wrong = []
    for turn in order.split():
        data = pipes.batches(1, 2 * micro, 4)
        x, target = data[0]
        if turn == "step":
            expected = pipes.alone(parts, data, micro, mse_loss)
            wrong.append(pipes.differences(pipes.piped(schedule, mine, count, data), expected, mine, count))
            continue
        losses: list[Tensor] = []
        last = {"target": target, "losses": losses} if count - 1 in mine else {}
        with torch.no_grad():
            got, right = schedule.eval(*([x] if 0 in mine else []), **last), nn.Sequential(*parts)(x)
        if last and not (pipes.close(got, right) and pipes.close(torch.stack(losses).mean(), mse_loss(right, target))):
            wrong.append(f"eval: {got}, not {right}; losses {losses}")
    agree(not any(wrong), wrong)


@since_2_13  # before, neighbours on one rank send each other a greeting, which Gloo cannot
@pytest.mark.feature("`schedule.eval`, in turn with steps")
def test_eval_of_a_v(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """Two neighbours on one rank: torch wants the gradient that eval has not made, on the rank at the bottom of the V."""
    parts = pipes.linear_parts(2 * size)

    def call(group: Any) -> None:
        mine = pipes.own(parts, pipes.places(rank, size, 2, "v"))
        schedule = ScheduleZBVZeroBubble(pipes.stages(mine, 2 * size, group), 1, mse_loss)
        last = {"target": torch.ones(2, 4).double()} if rank == 0 else {}
        error = None
        try:
            schedule.eval(*([torch.ones(2, 4).double()] if rank == 0 else []), **last)
        except AssertionError as caught:
            error = caught
        for said in everyone(error):
            if said is not None:
                raise said

    agree("backward" in refused_alike("`schedule.eval` of a V schedule", call, request.node, AssertionError))


# -- groups ------------------------------------------------------------------------------------------------------------


@needs_sort_ranks
@pytest.mark.feature("a pipeline in a group whose ranks are in another order")
@both
def test_backwards_group(kind: Any, rank: int, size: int) -> None:
    """Stage 0 on the last rank: peers are looked up as ranks of the group and asked for as global ones."""
    group = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    here = dist.get_rank(group)
    parts, data = pipes.linear_parts(size), pipes.batches(2, 2 * (size + 1), 4)
    mine = pipes.own(parts, [here])
    expected = pipes.alone(parts, data, size + 1, mse_loss)
    schedule = kind(pipes.stages(mine, size, group)[0], size + 1, loss_fn=mse_loss)
    wrong = pipes.differences(pipes.piped(schedule, mine, size, data), expected, mine, size)
    dist.destroy_process_group(group)
    agree(here == size - 1 - rank and not wrong, wrong)
