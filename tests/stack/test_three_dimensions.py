"""Tensor, data and pipeline parallelism together: each along its own dimension of one mesh, against one process.

mesh pp x dp x tp on 8 ranks (2 each):  ranks 0..3 hold the first part, 4..7 the second
                                        ranks 0 1 | 2 3 | 4 5 | 6 7 share out the columns and rows of a part's weights
                                        0 2 | 1 3 | 4 6 | 5 7 have different rows of the batch and average gradients
                                        0 4 | 1 5 | 2 6 | 3 7 are pipelines
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.stack import pipes
from tests.support import agree

SECTION = "Tensor and context parallel"

MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)]  # pp, dp, tp
meshes = pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, marks=pytest.mark.ranks(shape[0] * shape[1] * shape[2]), id="x".join(map(str, shape)))
        for shape in MESHES
    ],
)
KINDS = [
    pytest.param("Schedule1F1B", 1, "loop", id="1F1B"),
    pytest.param("ScheduleInterleaved1F1B", 2, "loop", id="Interleaved1F1B"),
    pytest.param("ScheduleZBVZeroBubble", 2, "v", id="ZBVZeroBubble"),
]


class Block(nn.Module):
    """x + down(tanh(up(x))): ``up`` is shared out by columns, ``down`` by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def check(shape: tuple[int, ...], name: str, per_rank: int, style: str, wrap: Any, cut: Any = None) -> None:
    """Three steps with parts of ``wrap(tensor parallel part, mesh of dp)``; ``cut``: a rank's share of a gradient, not scaled."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    pp, dp, _ = shape
    dp_rank, count, micro = mesh.get_local_rank("dp"), per_rank * pp, 2 * per_rank * pp
    parts: list[nn.Module] = [Block() for _ in range(count)]
    data = pipes.batches(3, dp * micro, 4)
    mine = pipes.own(parts, pipes.places(mesh.get_local_rank("pp"), pp, per_rank, style))
    mine = {index: wrap(parallelize_module(part, mesh["tp"], PLAN), mesh["dp"]) for index, part in mine.items()}
    group = mesh.get_group("pp")
    held = [
        PipelineStage(part, index, count, pipes.CPU, group=group, **pipes.linear_shapes(index)) for index, part in mine.items()
    ]
    schedule = getattr(pipelining, name)(held[0] if per_rank == 1 else held, micro, loss_fn=mse_loss, scale_grads=cut is None)
    got = pipes.piped(schedule, mine, count, pipes.share(data, dp_rank, dp))
    expected = []
    steps = pipes.alone(parts, data, dp * micro, mse_loss, divisor=None if cut is None else dp)
    for step in pipes.share_of_steps(steps, dp_rank, dp):
        shares = step.gradients if cut is None else {name: cut(name, g, mesh["tp"]) for name, g in step.gradients.items()}
        expected.append(step._replace(gradients=shares))
    wrong = pipes.differences(got, expected, mine, count)
    agree(not wrong, wrong)


@meshes
@pytest.mark.feature("TP x FSDP2 x PP together")
@pytest.mark.parametrize(("name", "per_rank", "style"), KINDS)
def test_fully_shard(shape: tuple[int, ...], name: str, per_rank: int, style: str) -> None:
    """Every rank talks in three groups at once: a mix-up of two of them changes a number or hangs."""
    check(shape, name, per_rank, style, lambda part, mesh: fully_shard(part, mesh=mesh, reshard_after_forward=False))


@meshes
@pytest.mark.feature("tensor parallel with DDP on a 2D mesh")
@pytest.mark.feature("TP x DDP x PP together")
@pytest.mark.parametrize(("name", "per_rank", "style"), KINDS[:2])
def test_ddp(shape: tuple[int, ...], name: str, per_rank: int, style: str) -> None:
    """DDP takes the shards for its parameters; a rank's gradients are its share of what one process has.

    Not scaled: such a module does not list its parameters any more, so that the schedule has nothing to divide.
    """

    def cut(name: str, gradient: Tensor, mesh: DeviceMesh) -> Tensor:
        dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name.split(".", 1)[1])
        return gradient if dim is None else gradient.chunk(mesh.size(), dim)[mesh.get_local_rank()]

    check(shape, name, per_rank, style, lambda part, mesh: DistributedDataParallel(part, device_mesh=mesh), cut)
