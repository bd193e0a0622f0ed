"""torch.distributed.pipelining trains like one process that runs all parts on the same micro-batches: outputs, losses, gradients.

Each schedule posts its messages in an order of its own, sends and receives of both directions mixed, all with tag 0: whoever
delivers one of them to the wrong receive, or waits in the wrong place, shows here.
"""

import copy
import functools
import itertools
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
    stage,
)
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.functional import mse_loss

from tests.stack import pipes
from tests.support import agree, needs_sort_ranks

# Before 2.13 every activation had to have a gradient, was received as a contiguous one, and all ranks had to give shapes or none.
since_2_13 = pytest.mark.skipif(not hasattr(stage, "InferenceMode"), reason="needs torch >= 2.13")
both = pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])


class Kind(NamedTuple):
    """A schedule: its name, parts per rank, how they lie, and which numbers of micro-batches it takes on n ranks."""

    name: str
    per_rank: int
    style: str
    micro: str  # such as "n 2n+1"; see `number`

    def made(self, mine: dict[int, nn.Module], count: int, micro: int, **more: Any) -> Any:
        stages = pipes.stages(mine, count)
        return getattr(pipelining, self.name)(stages[0] if self.per_rank == 1 else stages, micro, **more)


KINDS = [
    Kind("ScheduleGPipe", 1, "loop", "1 3"),
    Kind("Schedule1F1B", 1, "loop", "n 2n+1"),
    Kind("ScheduleLoopedBFS", 2, "loop", "1 n"),
    Kind("ScheduleInterleaved1F1B", 2, "loop", "n 2n"),
    Kind("ScheduleInterleavedZeroBubble", 2, "loop", "n 2n"),
    Kind("ScheduleZBVZeroBubble", 2, "v", "n 2n+1"),
    Kind("ScheduleDualPipeV", 2, "v", "2n 3n"),
]


def named(kind: Kind, *more: str) -> str:
    return "-".join([kind.name.removeprefix("Schedule"), str(kind.per_rank), *more])


CASES = [pytest.param(kind, micro, id=named(kind, micro)) for kind in KINDS for micro in kind.micro.split()]


def number(text: str, size: int) -> int:
    """'2n+1' on ``size`` ranks."""
    factor, n, rest = text.partition("n")
    return (int(factor or 1) * size if n else int(factor)) + int(rest or 0)


def scheduled(
    kind: Kind, micro: int, rows: int, rank: int, size: int, delay: Callable[[], float] | None = None, **more: Any
) -> None:
    """Trains linear parts both ways and agrees. rows: of a micro-batch. delay: seconds before a forward."""
    count, loss = kind.per_rank * size, more.pop("loss_fn", mse_loss)
    parts, data = pipes.linear_parts(count), pipes.batches(3 if rows < 100 else 1, micro * rows, 4)
    mine = pipes.own(parts, pipes.places(rank, size, kind.per_rank, kind.style))
    if delay is not None:
        for part in mine.values():
            part.register_forward_pre_hook(lambda *_: time.sleep(delay()))
    expected = pipes.alone(parts, data, micro, loss, divisor=None if more.get("scale_grads", True) else 1)
    schedule = kind.made(mine, count, micro, loss_fn=loss, **more)
    wrong = pipes.differences(pipes.piped(schedule, mine, count, data), expected, mine, count)
    agree(not wrong, wrong)


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_trains_like_one_process(kind: Kind, text: str, rank: int, size: int) -> None:
    """A message too early, too late or in the wrong buffer would change a gradient."""
    scheduled(kind, number(text, size), 2, rank, size)


@pytest.mark.parametrize("kind", KINDS, ids=named)
def test_large_and_late_messages(kind: Kind, rank: int, size: int, seed: int) -> None:
    """trap 21: a large message leaves only when its receive is posted; whoever waits for it before posting his own stops all."""
    drawn = random.Random(seed + rank)
    scheduled(kind, number(kind.micro.split()[-1], size), 2**13, rank, size, lambda: drawn.uniform(0, 4e-3))


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[5]], ids=named)
def test_unscaled_gradients(kind: Kind, rank: int, size: int) -> None:
    """Gradients are added over the micro-batches, not averaged."""
    loss = functools.partial(mse_loss, reduction="sum")
    scheduled(kind, number(kind.micro.split()[-1], size), 1, rank, size, loss_fn=loss, scale_grads=False)


# -- what travels between stages ---------------------------------------------------------------------------------------


def check(
    kind: Any, parts: list[nn.Module], data: list[pipes.Batch], rank: int, size: int, loss: pipes.Loss = mse_loss, **more: Any
) -> None:
    """Trains ``parts``, one per rank, both ways and agrees.

    more: tensors are keyword arguments of every part; ``atol``; ``shapes``: of this rank's stage; ``group``: whose ranks count.
    """
    atol, shapes, group = more.pop("atol", 1e-12), more.pop("shapes", {}), more.pop("group", None)
    mine = pipes.own(parts, [dist.get_rank(group)])
    expected = pipes.alone(parts, data, size + 1, loss, **more)
    schedule = kind(pipes.stages(mine, size, group, **shapes)[0], size + 1, loss_fn=loss)
    wrong = pipes.differences(pipes.piped(schedule, mine, size, data, **more), expected, mine, size, atol)
    agree(not wrong, wrong)


class Text(nn.Module):
    """Token numbers (rows, length) of int64 become vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 3, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.table(tokens))


@pytest.mark.parametrize("given", ["none", "all", pytest.param("some", marks=since_2_13)])
@both
def test_shapes(kind: Any, given: str, rank: int, size: int) -> None:
    """Shapes that the stages tell each other by objects, and then tensors of these, different between each two stages."""
    rows, length, widths = 2, 5, [3 + index % 4 for index in range(size)]
    layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(widths)]
    total = rows * (size + 1)
    data = [(torch.randint(11, (total, length)), torch.randn(total, length, widths[-1]).double()) for _ in range(2)]

    def activation(width: int) -> Tensor:
        return torch.empty(rows, length, width, dtype=torch.float64, device="meta", requires_grad=True)

    shapes = {}
    if given == "all" or (given == "some" and rank % 2 == 0):
        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        shapes = {"input_args": (activation(widths[rank - 1]) if rank else tokens,), "output_args": (activation(widths[rank]),)}
    check(kind, [Text(), *layers], data, rank, size, shapes=shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype: torch.dtype, rank: int, size: int) -> None:
    """The same operations on the same numbers: equal to the last bit, or a message was changed on its way."""
    check(Schedule1F1B, pipes.linear_parts(size, dtype=dtype), pipes.batches(2, 2 * (size + 1), 4, dtype), rank, size, atol=0)


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


@pytest.mark.parametrize("layout", ["transposed", "channels_last", pytest.param("every_other", marks=since_2_13)])
def test_layouts(layout: str, rank: int, size: int) -> None:
    """torch receives into a tensor with the sender's strides (from 2.13 on): memory order is not the order of elements."""
    data: list[pipes.Batch] = [(torch.randn(size + 1, 6, 6, 6).double(), torch.randn(size + 1, 6, 6, 6).double())] * 2
    check(Schedule1F1B, [Layout(layout) for _ in range(size)], data, rank, size)


class Several(nn.Module):
    """Hands on beside the activation a second one, and what needs no gradient: a mask of bool and numbers of int64."""

    def __init__(self, last: bool, plain: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(3, 3, dtype=torch.float64)
        self.last, self.plain = last, plain  # plain: for torch that can only hand on what has a gradient

    def forward(self, x: Tensor, y: Tensor, mask: Any = None, numbers: Any = 1, *, by: Tensor) -> Any:
        x, y = torch.tanh(self.a(x)) * by * numbers + y.mean(1, keepdim=True), self.b(y) * by
        if self.plain or self.last:
            return (x, y) if self.plain else (x.masked_fill(mask, 0.5), y)
        return x.masked_fill(mask, 0.5), y, mask.roll(1, 1), numbers + 1


@pytest.mark.parametrize(
    "plain",
    [pytest.param(True, id="activations"), pytest.param(False, marks=since_2_13, id="masks")],
)
@both
def test_several_tensors(kind: Any, plain: bool, rank: int, size: int) -> None:
    """Several messages per micro-batch between the same ranks, told apart by their order alone; gradients have fewer."""
    rows = 2 * (size + 1)
    inputs = (torch.randn(rows, 4).double(), torch.randn(rows, 3).double())
    more = () if plain else (torch.rand(rows, 4) < 0.5, torch.randint(1, 3, (rows, 1)))
    data: list[pipes.Batch] = [((*inputs, *more), torch.randn(rows, 4).double())] * 2
    parts = [Several(index == size - 1, plain) for index in range(size)]
    check(kind, parts, data, rank, size, lambda y, t: mse_loss(y[0], t) + y[1].square().mean(), by=torch.rand(rows, 1).double())


@since_2_13
def test_batch_in_another_dimension(rank: int, size: int) -> None:
    """Inputs are cut along dim 1 and the outputs joined along it."""
    parts, x = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(size)], torch.randn(2, 6, 4, dtype=torch.float64)
    (held,) = pipes.stages(pipes.own(parts, [rank]), size)
    schedule = ScheduleGPipe(held, 3, args_chunk_spec=(TensorChunkSpec(1),), output_merge_spec=TensorChunkSpec(1))
    with torch.no_grad():
        got, expected = schedule.step(*([x] if rank == 0 else [])), nn.Sequential(*parts)(x)
    agree(rank < size - 1 or pipes.close(got, expected), (got, expected))


@needs_sort_ranks
@both
def test_backwards_group(kind: Any, rank: int, size: int) -> None:
    """Stage 0 on the last rank: peers are looked up as ranks of the group and asked for as global ones."""
    group = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    agree(dist.get_rank(group) == size - 1 - rank)
    check(kind, pipes.linear_parts(size), pipes.batches(2, 2 * (size + 1), 4), rank, size, group=group)
    dist.destroy_process_group(group)


# -- forward only ------------------------------------------------------------------------------------------------------


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


# -- the tracer --------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """``count`` layers, cut in ``forward`` itself; or the first layer's output is wanted by all later layers."""

    def __init__(self, count: int, skip: bool = False) -> None:
        super().__init__()
        self.layers, self.skip = nn.ModuleList(pipes.linear_parts(count)), skip

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            if not self.skip:
                pipe_split()
            x = layer(x) + first if self.skip else layer(x)
        return x


def traced(model: Chain, count: int, x: Tensor) -> Any:
    """The model in ``count`` stages."""
    spec = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, count)} if model.skip else None
    return pipeline(model, mb_args=(x,), split_spec=spec)


@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_traced_stages(rank: int, size: int) -> None:
    """Here stages know their shapes from the trace and greet their neighbours in a batch of sends and receives."""
    micro, count = 2 * size, 2 * size
    model, ((x, target),) = Chain(count), pipes.batches(1, 2 * micro, 4)
    alone, pipe, places = copy.deepcopy(model), traced(model, count, x.tensor_split(micro)[0]), pipes.places(rank, size, 2)
    stages = [build_stage(pipe.get_stage_module(place), place, pipe.info(), pipes.CPU) for place in places]
    schedule = ScheduleInterleaved1F1B(stages, micro, loss_fn=mse_loss)
    schedule.step(*([x] if 0 in places else []), **({"target": target, "losses": []} if count - 1 in places else {}))
    mse_loss(alone(x), target).backward()
    found = {name: p.grad for stage in stages for name, p in stage.submod.named_parameters()}
    wrong = [name for name, gradient in found.items() if not pipes.close(gradient, alone.get_parameter(name).grad)]
    agree(len(found) == 2 * len(stages) and pipe.num_stages == count and not wrong, (wrong, found))


@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_skip_connections(rank: int, size: int) -> None:
    """Stage 0 sends to all; torch has no backward for this."""
    model, x = Chain(size, skip=True), torch.randn(6, 4, dtype=torch.float64)
    schedule = ScheduleGPipe(traced(model, size, x[:2]).build_stage(rank, pipes.CPU), 3)
    with torch.no_grad():
        expected = model(x)
        got = [schedule.step(*([x] if rank == 0 else [])) for _ in range(2)]
    agree(rank < size - 1 or all(pipes.close(y, expected) for y in got), (got, expected))
