"""Model parallelism on the layers of a transformer: a pipeline, and tensor parallelism."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.steps.models import HEAD, Task, loss
from benchmarks.steps.step import Means, Step, Workload

MICRO_BATCHES = 4  # for each rank
SCHEDULES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
PLAN = {
    **{f"*.{name}": ColwiseParallel() for name in ("query", "key", "value", "up")},
    **{f"*.{name}": RowwiseParallel() for name in ("out", "down")},
}


def pipeline(kind: str, task: Task) -> Workload:
    """Rank i has the i-th part of the layers, whose number is a multiple of the number of ranks. A batch is a micro-batch.

    Computation alone is that of this rank's layers, times (micro-batches + ranks - 1) / micro-batches: while a pipeline of equal
    stages is filled and drained, ranks wait, whatever communication costs.
    """
    return Workload(
        f"pipeline {kind} {task.name}",
        task,
        partial(_pipeline, kind),
        batches=lambda size: MICRO_BATCHES * size,
        traffic=lambda task, size: [("latency", task.batch(0).nbytes)] * (2 * MICRO_BATCHES * size),
        alone=lambda size: (MICRO_BATCHES * size + size - 1) / (MICRO_BATCHES * size),
        why_not=lambda size: "" if size > 1 else "needs two ranks",
    )


def _pipeline(kind: str, task: Task, means: Means) -> Step:
    count = MICRO_BATCHES * means.size
    layers = list(task.model().named_children())
    each = len(layers) // means.size
    part = nn.Sequential(OrderedDict(layers[means.rank * each :][:each]))  # the names are those of the whole
    batches = [task.batch(number) for number in range(count)]
    if means.group is None:
        return Step(part, partial(_stage_alone, part, batches, means.rank > 0))
    stage = PipelineStage(part, means.rank, means.size, torch.device("cpu"), group=means.group)
    schedule = SCHEDULES[kind](stage, count, loss_fn=lambda output, target: loss(output))
    whole = torch.cat(batches)
    inputs = (whole,) if means.rank == 0 else ()
    target = whole if means.rank == means.size - 1 else None
    return Step(part, lambda: schedule.step(*inputs, target=target))


def _stage_alone(part: nn.Module, batches: list[Tensor], behind_another: bool) -> None:
    for batch in batches:
        loss(part(batch.detach().requires_grad_(behind_another))).backward()


def tensor(task: Task) -> Workload:
    """The ranks share heads and hidden features, and see the same batch.

    In each layer there are two all_reduces in the forward pass, and four in the backward pass: of the gradients of the inputs of
    query, key, value and up.
    """
    heads = task.shape[-1] // HEAD
    return Workload(
        f"tensor parallel {task.name}",
        task,
        _tensor,
        batches=lambda size: 1,
        traffic=_activations,
        why_not=lambda size: f"{heads} heads on {size} ranks" if heads % size else "",
    )


def _activations(task: Task, size: int) -> list[tuple[str, int]]:
    return [("all_reduce", task.batch(0).nbytes)] * (6 * len(list(task.model().children())))


def _tensor(task: Task, means: Means) -> Step:
    batch = task.batch(0)
    mesh = means.mesh()
    # The weights are the same on all ranks: nothing is scattered, which the fake group could not do.
    model = parallelize_module(task.model(), mesh, PLAN, src_data_rank=None)
    return Step(model, lambda: loss(model(batch)).backward())
