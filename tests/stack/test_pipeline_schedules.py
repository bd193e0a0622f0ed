"""Every schedule of torch.distributed.pipelining trains like one process: outputs, losses and all gradients.

Each posts its messages in an order of its own, sends and receives of both directions mixed, all with tag 0: whoever delivers
one of them to the wrong receive, or waits in the wrong place, shows here.
"""

from __future__ import annotations

import functools
import random
import time
from typing import Any, NamedTuple

import pytest
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

from tests.stack import pipes
from tests.support import agree

SECTION = "Pipelines"


class Kind(NamedTuple):
    """A schedule: its name, parts per rank, how they lie, and which numbers of micro-batches it takes on n ranks."""

    name: str
    per_rank: int
    style: str
    micro: str  # such as "n 2n+1"; see `number`


KINDS = [
    Kind("ScheduleGPipe", 1, "loop", "1 3"),
    Kind("Schedule1F1B", 1, "loop", "n 2n+1"),
    Kind("ScheduleLoopedBFS", 2, "loop", "1 n"),
    Kind("ScheduleInterleaved1F1B", 2, "loop", "n 2n"),
    Kind("ScheduleInterleaved1F1B", 3, "loop", "2n"),
    Kind("ScheduleInterleavedZeroBubble", 2, "loop", "n 2n"),
    Kind("ScheduleInterleavedZeroBubble", 3, "loop", "2n"),
    Kind("ScheduleZBVZeroBubble", 2, "v", "n 2n+1"),
    Kind("ScheduleDualPipeV", 2, "v", "2n 3n"),
]
CASES = [
    pytest.param(
        kind,
        micro,
        marks=pytest.mark.feature(f"`{kind.name}`"),
        id=f"{kind.name.removeprefix('Schedule')}-{kind.per_rank}-{micro}",
    )
    for kind in KINDS
    for micro in kind.micro.split()
]


def number(text: str, size: int) -> int:
    """'2n+1' on ``size`` ranks."""
    factor, n, rest = text.partition("n")
    return (int(factor or 1) * size if n else int(factor)) + int(rest or 0)


def schedule_of(kind: Kind, mine: dict[int, nn.Module], count: int, micro: int, **more: Any) -> Any:
    made = pipes.stages(mine, count)
    return getattr(pipelining, kind.name)(made[0] if kind.per_rank == 1 else made, micro, **more)


@pytest.mark.parametrize(("kind", "text"), CASES)
def test_trains_like_one_process(kind: Kind, text: str, rank: int, size: int) -> None:
    """A message too early, too late or in the wrong buffer would change a gradient."""
    micro, count = number(text, size), kind.per_rank * size
    parts, data = pipes.linear_parts(count), pipes.batches(3, 2 * micro, 4)
    mine = pipes.own(parts, pipes.places(rank, size, kind.per_rank, kind.style))
    expected = pipes.alone(parts, data, micro, mse_loss)
    schedule = schedule_of(kind, mine, count, micro, loss_fn=mse_loss)
    wrong = pipes.differences(pipes.piped(schedule, mine, count, data), expected, mine, count)
    agree(not wrong, wrong)


@pytest.mark.parametrize(
    "kind",
    [kind for kind in KINDS if kind.per_rank < 3],
    ids=lambda kind: f"{kind.name.removeprefix('Schedule')}-{kind.per_rank}",
)
@pytest.mark.feature("activations of 256 KiB, ranks of uneven speed")
def test_large_and_late_messages(kind: Kind, rank: int, size: int, seed: int) -> None:
    """trap 21: a large message leaves only when its receive is posted; whoever waits for it before posting his own stops all."""
    micro, count = number(kind.micro.split()[-1], size), kind.per_rank * size
    parts, data = pipes.linear_parts(count), pipes.batches(1, micro * 2**13, 4)
    mine = pipes.own(parts, pipes.places(rank, size, kind.per_rank, kind.style))
    delay = random.Random(seed + rank)
    for part in mine.values():
        part.register_forward_pre_hook(lambda *_: time.sleep(delay.uniform(0, 4e-3)))  # seconds
    schedule = schedule_of(kind, mine, count, micro, loss_fn=mse_loss)
    expected = pipes.alone(parts, data, micro, mse_loss)
    wrong = pipes.differences(pipes.piped(schedule, mine, count, data), expected, mine, count)
    agree(not wrong, wrong)


@pytest.mark.feature("losses that are summed (`scale_grads=False`)")
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[7]], ids=lambda kind: f"{kind.name.removeprefix('Schedule')}-{kind.per_rank}")
def test_unscaled_gradients(kind: Kind, rank: int, size: int) -> None:
    """Gradients are added over the micro-batches, not averaged."""
    micro, count = number(kind.micro.split()[-1], size), kind.per_rank * size
    parts, data = pipes.linear_parts(count), pipes.batches(2, micro, 4)
    loss = functools.partial(mse_loss, reduction="sum")
    mine = pipes.own(parts, pipes.places(rank, size, kind.per_rank, kind.style))
    schedule = schedule_of(kind, mine, count, micro, loss_fn=loss, scale_grads=False)
    expected = pipes.alone(parts, data, micro, loss, divisor=1)
    wrong = pipes.differences(pipes.piped(schedule, mine, count, data), expected, mine, count)
    agree(not wrong, wrong)
