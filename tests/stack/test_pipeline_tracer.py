"""torch.distributed.pipelining with the tracer: one model, cut by `pipeline(...)`, of which each rank builds its stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, build_stage, pipe_split, pipeline
from torch.nn.functional import mse_loss

from tests.stack import pipes
from tests.support import agree, everyone

SECTION = "Pipelines"
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export


class Chain(nn.Module):
    """``count`` layers; the whole, or cut in ``forward`` itself."""

    def __init__(self, count: int, cut: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(pipes.linear_parts(count))
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.cut and index:
                pipe_split()
            x = layer(x)
        return x


def cut(model: nn.Module, count: int, *inputs: Tensor, cut_inside: bool = False) -> Any:
    """The traced model in ``count`` stages."""
    spec = None if cut_inside else {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, count)}
    return pipeline(model, mb_args=inputs, split_spec=spec)


def train_alone(model: nn.Module, data: list[pipes.Batch], micro: int) -> list[pipes.Step]:
    """As one part that holds all."""
    return pipes.alone([model], data, micro, mse_loss)


def check(schedule: Any, stages: list[Any], whole: nn.Module, data: list[pipes.Batch], micro: int) -> str:
    """Trains both ways; the traced stages keep the names of the model's parameters."""
    mine, count = {stage.stage_index: stage.submod for stage in stages}, stages[0].num_stages
    got = pipes.piped(schedule, mine, count, data)
    wrong = []
    for number, (step, right) in enumerate(zip(got, train_alone(whole, data, micro), strict=True)):
        found = {name.split(".", 1)[1]: g for name, g in step.gradients.items()}
        wanted = {name.split(".", 1)[1]: g for name, g in right.gradients.items()}
        wrong += [
            f"step {number}: {name} {g}, not {wanted[name]}" for name, g in found.items() if not pipes.close(g, wanted[name])
        ]
        if count - 1 in mine and not pipes.close(torch.stack(step.losses), torch.stack(right.losses)):
            wrong.append(f"step {number}: losses {step.losses}, not {right.losses}")
        if count - 1 in mine and not pipes.close(step.output[0], right.output[0]):
            wrong.append(f"step {number}: output {step.output}, not {right.output}")
        shares = everyone(sorted(found))
        if sorted(name for share in shares for name in share) != sorted(wanted):
            wrong.append(f"gradients of {shares}")
    return "\n".join(wrong[:3])


@pytest.mark.feature("the tracer: `pipeline`, `SplitPoint`, `pipe_split`, `build_stage`")
@pytest.mark.parametrize("inside", [False, True], ids=["SplitPoint", "pipe_split"])
@pytest.mark.parametrize(
    ("name", "per_rank"), [("ScheduleGPipe", 1), ("Schedule1F1B", 1), ("ScheduleInterleaved1F1B", 2), ("ScheduleLoopedBFS", 2)]
)
def test_traced_stages(name: str, per_rank: int, inside: bool, rank: int, size: int) -> None:
    """Here stages know their shapes from the trace and greet their neighbours in a batch of sends and receives."""
    micro, count = 2 * size, per_rank * size
    model, data = Chain(count, inside), pipes.batches(2, 2 * micro, 4)
    whole = Chain(count)
    whole.load_state_dict(model.state_dict())
    pipe = cut(model, count, data[0][0].tensor_split(micro)[0], cut_inside=inside)
    assert pipe.num_stages == count
    numbers = pipes.places(rank, size, per_rank)
    if inside:
        stages = [build_stage(pipe.get_stage_module(number), number, pipe.info(), pipes.CPU) for number in numbers]
    else:
        stages = [pipe.build_stage(number, pipes.CPU) for number in numbers]
    schedule = getattr(pipelining, name)(stages[0] if per_rank == 1 else stages, micro, loss_fn=mse_loss)
    wrong = check(schedule, stages, whole, data, micro)
    agree(not wrong, wrong)


class Skipping(nn.Module):
    """The first layer's output is wanted by all later layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(pipes.linear_parts(count))

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x) + first
        return x


@pytest.mark.feature("skip connections between stages, forward only")
def test_skip_connections(rank: int, size: int) -> None:
    """Stage 0 sends to all; torch has no backward for this."""
    model, x = Skipping(size), torch.randn(6, 4, dtype=torch.float64)
    pipe = cut(model, size, x[:2])
    schedule = ScheduleGPipe(pipe.build_stage(rank, pipes.CPU), 3)
    with torch.no_grad():
        expected = model(x)
        got = [schedule.step(*([x] if rank == 0 else [])) for _ in range(2)]
    agree(rank < size - 1 or all(pipes.close(y, expected) for y in got), (got, expected))
