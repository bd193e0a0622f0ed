"""Pipelines beside data parallelism: each along one dimension of a mesh, DDP or fully_shard along the other.

mesh dp x pp on 4 ranks, pp = 2:      ranks 0 1    each row is a pipeline of two stages with its own batch,
                                      ranks 2 3    each column holds the same parts and averages their gradients
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import config, pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleavedZeroBubble, stage
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.stack import pipes
from tests.stack.record import refused_alike
from tests.support import agree, everyone

SECTION = "Pipelines"
SPLIT = "schedules with a split backward (zero bubble, DualPipeV)"
WITH_DDP = pytest.mark.feature("a pipeline of stages in DDP, dp x pp mesh")
FULLY_SHARDED = pytest.mark.feature("a pipeline of fully sharded stages (FSDP2), dp x pp mesh")
FOR_EACH_EDGE = [
    pytest.mark.feature("a group for each edge of the pipeline (`pipeline_per_edge_p2p`)"),
    pytest.mark.skipif(not hasattr(config, "pipeline_per_edge_p2p"), reason="needs torch >= 2.15"),
]
KINDS = {  # parts per rank, how they lie; the last two make the gradients of inputs and of weights one after the other
    "1F1B": (1, "loop"),
    "Interleaved1F1B": (2, "loop"),
    "ZBVZeroBubble": (2, "v"),
    "DualPipeV": (2, "v"),
}
CASES = [
    *(pytest.param("DDP", kind, marks=WITH_DDP) for kind in list(KINDS)[:2]),
    *(pytest.param("reshard", kind, marks=FULLY_SHARDED) for kind in list(KINDS)[:2]),
    *(pytest.param("keep", kind, marks=FULLY_SHARDED) for kind in list(KINDS)[1:]),
    *(pytest.param("keep, a group for each edge", kind, marks=FOR_EACH_EDGE) for kind in list(KINDS)[1:]),
]


def wrapped(way: str, part: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if way == "DDP":
        return DistributedDataParallel(part, process_group=mesh.get_group())
    return fully_shard(part, mesh=mesh, reshard_after_forward=way == "reshard")


@pytest.mark.parametrize(("way", "kind"), CASES)
def test_beside_data_parallelism(way: str, kind: str, size: int) -> None:
    """DDP reduces after the last micro-batch only, FSDP gathers between the messages of the pipeline, in the other group.

    For DDP shapes are given: to find them out torch (since 2.13) runs a stage outside of ``no_sync``, which DDP does not bear. A
    group for each edge splits the pipeline's group into pairs, by direction: what was one queue of messages is several.
    """
    per_rank, style = KINDS[kind]
    pp = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // pp, pp), mesh_dim_names=("dp", "pp"))
    dp, dp_rank, count, micro = size // pp, mesh.get_local_rank("dp"), per_rank * pp, 2 * per_rank * pp
    parts, data = pipes.linear_parts(count), pipes.batches(3, dp * micro, 4)
    mine = pipes.own(parts, pipes.places(mesh.get_local_rank("pp"), pp, per_rank, style))
    mine = {index: wrapped(way, part, mesh["dp"]) for index, part in mine.items()}
    with config.patch(pipeline_per_edge_p2p=True) if "edge" in way else contextlib.nullcontext():
        held = staged(mine, count, mesh.get_group("pp"), given=way == "DDP")
        schedule = getattr(pipelining, f"Schedule{kind}")(held[0] if per_rank == 1 else held, micro, loss_fn=mse_loss)
        got = pipes.piped(schedule, mine, count, pipes.share(data, dp_rank, dp))
    expected = pipes.alone(parts, data, dp * micro, mse_loss)
    wrong = pipes.differences(got, pipes.share_of_steps(expected, dp_rank, dp), mine, count)
    agree(not wrong, wrong)


def staged(mine: dict[int, nn.Module], count: int, group: Any, given: bool) -> list[PipelineStage]:
    shapes = {index: pipes.linear_shapes(index) if given else {} for index in mine}
    return [PipelineStage(part, i, count, pipes.CPU, group=group, **shapes[i]) for i, part in mine.items()]


def zero_bubble(mine: dict[int, nn.Module], data: list[pipes.Batch], expected: list[pipes.Step], group: Any) -> None:
    """Raises AssertionError on all ranks if any gets something else than ``expected``."""
    count = 2 * dist.get_world_size(group)
    schedule = ScheduleInterleavedZeroBubble(staged(mine, count, group, given=True), len(expected[0].losses), loss_fn=mse_loss)
    wrong = pipes.differences(pipes.piped(schedule, mine, count, data), expected, mine, count)
    assert not any(everyone(wrong)), "wrong gradients"


@pytest.mark.skipif(not hasattr(stage, "InferenceMode"), reason="needs torch >= 2.13")
@WITH_DDP
def test_with_ddp_and_shapes_inferred(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """Each rank is a pipeline of one stage, so that all see the error."""
    alone, _ = dist.new_subgroups_by_enumeration([[r] for r in range(size)])

    def call(group: Any) -> None:
        part = DistributedDataParallel(pipes.linear_parts(1)[0], process_group=group)
        schedule = ScheduleGPipe(PipelineStage(part, 0, 1, pipes.CPU, group=alone), 2, mse_loss)
        try:
            for _ in range(2):
                schedule.step(torch.ones(2, 4).double(), target=torch.ones(2, 4).double())
        except RuntimeError as error:
            raise (error.__cause__ or error) from None

    said = refused_alike("a pipeline of stages in DDP, their shapes inferred", call, request.node, RuntimeError)
    dist.destroy_process_group(alone)
    agree("rebuilt" in said, said)


@FULLY_SHARDED
@pytest.mark.min_ranks(2)
def test_with_fully_shard_and_a_split_backward(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """Where parameters are freed between the two halves of backward, torch's gradients are wrong, over Gloo too."""
    parts, data = pipes.linear_parts(2 * size), pipes.batches(1, 4 * size, 4)
    expected = pipes.alone(parts, data, 4 * size, mse_loss)

    def call(group: Any) -> None:
        single, _ = dist.new_subgroups_by_enumeration([[r] for r in range(size)], backend=dist.get_backend(group))
        mesh = DeviceMesh.from_group(single, "cpu", mesh_dim_names=("dp",))
        mine = pipes.own(parts, pipes.places(rank, size, 2))
        zero_bubble({index: wrapped("reshard", part, mesh) for index, part in mine.items()}, data, expected, group)

    what = f"{SPLIT} of FSDP2 stages with reshard_after_forward=True"
    agree("gradients" in refused_alike(what, call, request.node, AssertionError))


@WITH_DDP
@pytest.mark.ranks(4)
def test_with_ddp_and_a_split_backward(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """DDP does not hear of gradients that come from torch.autograd.grad: each rank keeps its own."""
    parts, data = pipes.linear_parts(4), pipes.batches(1, 8, 4)
    expected = pipes.share_of_steps(pipes.alone(parts, data, 8, mse_loss), rank // 2, 2)

    def call(group: Any) -> None:
        pp, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]], backend=dist.get_backend(group))
        dp, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend=dist.get_backend(group))
        mine = pipes.own(parts, pipes.places(rank % 2, 2, 2))
        mine = {index: DistributedDataParallel(part, process_group=dp) for index, part in mine.items()}
        zero_bubble(mine, pipes.share(data, rank // 2, 2), expected, pp)

    agree("gradients" in refused_alike(f"{SPLIT} of stages in DDP", call, request.node, AssertionError))
