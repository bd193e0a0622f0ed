"""Pipeline, data and tensor parallelism together: each along its own dimension of one mesh, against one process.

mesh pp x dp x tp on 8 ranks (2 each):  ranks 0..3 hold the first part, 4..7 the second
                                        ranks 0 1 | 2 3 | 4 5 | 6 7 share out the columns and rows of a part's weights
                                        0 2 | 1 3 | 4 6 | 5 7 have different rows of the batch and average gradients
                                        0 4 | 1 5 | 2 6 | 3 7 are pipelines
"""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import config, pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.stack import pipes
from tests.stack.meshes import grids
from tests.stack.refused import refused_alike
from tests.support import agree, everyone

NAMES = ("pp", "dp", "tp")
KINDS = {  # parts per rank, how they lie; the last three make the gradients of inputs and of weights one after the other
    "1F1B": (1, "loop"),
    "Interleaved1F1B": (2, "loop"),
    "ZBVZeroBubble": (2, "v"),
    "DualPipeV": (2, "v"),
    "InterleavedZeroBubble": (2, "loop"),
}
by_edge = pytest.mark.skipif(not hasattr(config, "pipeline_per_edge_p2p"), reason="needs torch >= 2.15")
CASES = [
    *(pytest.param("DDP", kind) for kind in list(KINDS)[:2]),
    *(pytest.param("reshard", kind) for kind in list(KINDS)[:2]),
    *(pytest.param("keep", kind) for kind in list(KINDS)[:4]),
    *(pytest.param("keep, a group for each edge", kind, marks=by_edge) for kind in list(KINDS)[1:4]),
]
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    """x + down(tanh(up(x))): ``up`` is shared out by columns, ``down`` by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def wrapped(way: str, part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    in_shards = mesh["tp"].size() > 1
    if in_shards:
        part = parallelize_module(part, mesh["tp"], PLAN)
    if way == "DDP":
        given: dict[str, Any] = {"device_mesh": mesh["dp"]} if in_shards else {"process_group": mesh.get_group("dp")}
        return DistributedDataParallel(part, **given)
    return fully_shard(part, mesh=mesh["dp"], reshard_after_forward=way == "reshard")


def cut(name: str, gradient: Tensor, mesh: DeviceMesh) -> Tensor:
    """The rank's share of a gradient."""
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name.split(".", 1)[1])
    return gradient if dim is None else gradient.chunk(mesh.size(), dim)[mesh.get_local_rank()]


def differences(shape: tuple[int, ...], way: str, kind: str, backend: str = "mpi") -> str:
    """What differs from one process after three steps. For DDP shapes are given: torch infers them outside of ``no_sync``.

    DDP takes the shards for its parameters. Such a module does not list them any more, so that the schedule divides nothing.
    """
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES, backend_override=dict.fromkeys(NAMES, backend))
    (pp, dp, tp), (per_rank, style) = shape, KINDS[kind]
    dp_rank, count, micro, unscaled = mesh.get_local_rank("dp"), per_rank * pp, 2 * per_rank * pp, way == "DDP" and tp > 1
    parts: list[nn.Module] = [Block() for _ in range(count)]
    data = pipes.batches(3, dp * micro, 4)
    mine = pipes.own(parts, pipes.places(mesh.get_local_rank("pp"), pp, per_rank, style))
    mine = {index: wrapped(way, part, mesh) for index, part in mine.items()}
    group = mesh.get_group("pp")
    with config.patch(pipeline_per_edge_p2p=True) if "edge" in way else contextlib.nullcontext():
        held = [PipelineStage(part, i, count, pipes.CPU, group=group, **pipes.linear_shapes(i)) for i, part in mine.items()]
        made = getattr(pipelining, f"Schedule{kind}")
        schedule = made(held[0] if per_rank == 1 else held, micro, loss_fn=mse_loss, scale_grads=not unscaled)
        got = pipes.piped(schedule, mine, count, pipes.share(data, dp_rank, dp))
    expected = []
    steps = pipes.alone(parts, data, dp * micro, mse_loss, divisor=dp if unscaled else None)
    for step in pipes.share_of_steps(steps, dp_rank, dp):
        shares = {name: cut(name, g, mesh["tp"]) if unscaled else g for name, g in step.gradients.items()}
        expected.append(step._replace(gradients=shares))
    return pipes.differences(got, expected, mine, count)


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize(("way", "kind"), CASES)
def test_trains_as_one_process_does(way: str, kind: str, size: int) -> None:
    """Every rank talks in three groups at once: a mix-up of two of them changes a number or hangs."""
    for shape in grids(size, 3):
        if max(shape) < 4 and shape[2] < 3:
            wrong = differences(shape, way, kind)
            agree(not wrong, f"{shape}: {wrong}")


@pytest.mark.parametrize(
    "way", [pytest.param("reshard", marks=pytest.mark.ranks(2, 4)), pytest.param("DDP", marks=pytest.mark.ranks(4))]
)
def test_with_a_split_backward(way: str, size: int) -> None:
    """torch's gradients are wrong, over Gloo too: parameters are freed in between, or DDP does not hear of all gradients."""

    def call(group: Any) -> None:
        wrong = everyone(differences((2, size // 2, 1), way, "InterleavedZeroBubble", dist.get_backend(group)))
        assert not any(wrong), "wrong gradients"

    agree("gradients" in refused_alike(call, AssertionError))
