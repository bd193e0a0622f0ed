"""Pipelines beside data parallelism: each along one dimension of a mesh, DDP or fully_shard along the other.

mesh dp x pp on 4 ranks, pp = 2:      ranks 0 1    each row is a pipeline of two stages with its own batch,
                                      ranks 2 3    each column holds the same parts and averages their gradients
"""

from __future__ import annotations

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

KINDS = [
    pytest.param("ScheduleGPipe", 1, "loop", id="GPipe"),
    pytest.param("Schedule1F1B", 1, "loop", id="1F1B"),
    pytest.param("ScheduleInterleaved1F1B", 2, "loop", id="Interleaved1F1B"),
    pytest.param("ScheduleInterleavedZeroBubble", 2, "loop", id="InterleavedZeroBubble"),
    pytest.param("ScheduleZBVZeroBubble", 2, "v", id="ZBVZeroBubble"),
    pytest.param("ScheduleDualPipeV", 2, "v", id="DualPipeV"),
]
WHOLE_BACKWARD = KINDS[:3]  # the others make the gradients of inputs and of weights one after the other
SPLIT = "schedules with a split backward (zero bubble, DualPipeV)"
FULLY_SHARDED = [
    pytest.param(*kind.values, reshard, id=f"{kind.id}-{'reshard' if reshard else 'keep'}")
    for reshard, kinds in ((True, WHOLE_BACKWARD), (False, KINDS))
    for kind in kinds
]


def check(name: str, per_rank: int, style: str, size: int, wrap: Any, shapes: Any = None) -> None:
    pp = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // pp, pp), mesh_dim_names=("dp", "pp"))
    dp, dp_rank, count, micro = size // pp, mesh.get_local_rank("dp"), per_rank * pp, 2 * per_rank * pp
    parts, data = pipes.linear_parts(count), pipes.batches(3, dp * micro, 4)
    mine = pipes.own(parts, pipes.places(mesh.get_local_rank("pp"), pp, per_rank, style))
    mine = {index: wrap(part, mesh["dp"]) for index, part in mine.items()}
    group = mesh.get_group("pp")
    held = [PipelineStage(part, i, count, pipes.CPU, group=group, **(shapes(i) if shapes else {})) for i, part in mine.items()]
    schedule = getattr(pipelining, name)(held[0] if per_rank == 1 else held, micro, loss_fn=mse_loss)
    got = pipes.piped(schedule, mine, count, pipes.share(data, dp_rank, dp))
    expected = pipes.alone(parts, data, dp * micro, mse_loss)
    wrong = pipes.differences(got, pipes.share_of_steps(expected, dp_rank, dp), mine, count)
    agree(not wrong, wrong)


@pytest.mark.skipif(not hasattr(config, "pipeline_per_edge_p2p"), reason="needs torch >= 2.15")
@pytest.mark.feature("a group for each edge of the pipeline (`pipeline_per_edge_p2p`)")
@pytest.mark.parametrize(("name", "per_rank", "style"), KINDS)
def test_with_a_group_for_each_edge(name: str, per_rank: int, style: str, size: int) -> None:
    """torch splits the pipeline's group into pairs, by direction; what was one queue of messages is several."""
    with config.patch(pipeline_per_edge_p2p=True):
        check(name, per_rank, style, size, lambda part, mesh: fully_shard(part, mesh=mesh, reshard_after_forward=False))


@pytest.mark.feature("a pipeline of stages in DDP, dp x pp mesh")
@pytest.mark.parametrize(("name", "per_rank", "style"), WHOLE_BACKWARD)
def test_with_ddp(name: str, per_rank: int, style: str, size: int) -> None:
    """DDP reduces after the last micro-batch only, while messages of the pipeline are under way in the other group.

    Shapes are given: to find them out torch (since 2.13) runs a stage outside of ``no_sync``, which DDP does not bear.
    """

    def wrap(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(part, process_group=mesh.get_group())

    check(name, per_rank, style, size, wrap, pipes.linear_shapes)


@pytest.mark.skipif(not hasattr(stage, "InferenceMode"), reason="needs torch >= 2.13")
@pytest.mark.feature("a pipeline of stages in DDP, dp x pp mesh")
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


@pytest.mark.feature("a pipeline of fully sharded stages (FSDP2), dp x pp mesh")
@pytest.mark.parametrize(("name", "per_rank", "style", "reshard"), FULLY_SHARDED)
def test_with_fully_shard(name: str, per_rank: int, style: str, reshard: bool, size: int) -> None:
    """Parameters are gathered in between the messages of the pipeline, gradients reduced at the end of the step."""

    def wrap(part: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return fully_shard(part, mesh=mesh, reshard_after_forward=reshard)

    check(name, per_rank, style, size, wrap)


@pytest.mark.feature("a pipeline of fully sharded stages (FSDP2), dp x pp mesh")
@pytest.mark.min_ranks(2)
def test_with_fully_shard_and_a_split_backward(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """Where parameters are freed between the two halves of backward, torch's gradients are wrong, over Gloo too."""
    parts, data = pipes.linear_parts(2 * size), pipes.batches(1, 4 * size, 4)
    expected = pipes.alone(parts, data, 4 * size, mse_loss)

    def call(group: Any) -> None:
        single, _ = dist.new_subgroups_by_enumeration([[r] for r in range(size)], backend=dist.get_backend(group))
        mesh = DeviceMesh.from_group(single, "cpu", mesh_dim_names=("dp",))
        mine = pipes.own(parts, pipes.places(rank, size, 2))
        mine = {index: fully_shard(part, mesh=mesh, reshard_after_forward=True) for index, part in mine.items()}
        zero_bubble(mine, data, expected, group)

    what = f"{SPLIT} of FSDP2 stages with reshard_after_forward=True"
    agree("gradients" in refused_alike(what, call, request.node, AssertionError))


@pytest.mark.feature("a pipeline of stages in DDP, dp x pp mesh")
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


def zero_bubble(mine: dict[int, nn.Module], data: list[pipes.Batch], expected: list[pipes.Step], group: Any) -> None:
    """Raises AssertionError on all ranks if any gets something else than ``expected``."""
    count = 2 * dist.get_world_size(group)
    held = [PipelineStage(part, i, count, pipes.CPU, group=group, **pipes.linear_shapes(i)) for i, part in mine.items()]
    schedule = ScheduleInterleavedZeroBubble(held, len(expected[0].losses), loss_fn=mse_loss)
    wrong = pipes.differences(pipes.piped(schedule, mine, count, data), expected, mine, count)
    assert not any(everyone(wrong)), "wrong gradients"
