"""Data parallelism: DistributedDataParallel, and FSDP2 (fully_shard). Rank i has batch i."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.steps.models import Task, loss
from benchmarks.steps.step import Means, Step, Workload, weight_bytes
from mpicoll.bench.formulas import spell

MIB = 1 << 20
HALF = "bf16_compress_hook"
BFLOAT16 = 1e-2  # relative error of a sum that is rounded to bfloat16


def ddp(task: Task, bucket_nbytes: int = 25 * MIB, hook: str = "") -> Workload:
    """bucket_nbytes: of a bucket of gradients, PyTorch's default is 25 MiB; hook: HALF, or none."""
    notes = [f"buckets of {spell(bucket_nbytes)}"] * (bucket_nbytes != 25 * MIB) + [hook] * bool(hook)
    half = hook == HALF
    return Workload(
        ", ".join([f"DDP {task.name}", *notes]),
        task,
        partial(_ddp, bucket_nbytes, hook),
        batches=_one_for_each_rank,
        traffic=lambda task, size: [("all_reduce", weight_bytes(task) // (2 if half else 1))],
        tolerance=BFLOAT16 if half else 1e-3,
    )


def _ddp(bucket_nbytes: int, hook: str, task: Task, means: Means) -> Step:
    half = hook == HALF
    model, batch = task.model(), task.batch(means.rank)
    wrapped = DistributedDataParallel(model, process_group=means.group, bucket_cap_mb=bucket_nbytes / MIB)
    if means.group is None:
        wrapped.register_comm_hook(means.size, _compressed if half else _as_it_is)
    elif half:
        wrapped.register_comm_hook(means.group, _bf16)
    return Step(model, lambda: loss(wrapped(batch)).backward())


def _as_it_is(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _bf16(state, bucket):  # type: ignore[no-untyped-def]
    """`bf16_compress_hook`, which DDP refuses by its name where there is no GPU."""
    return bf16_compress_hook(state, bucket)


def _compressed(state, bucket):  # type: ignore[no-untyped-def]
    """`bf16_compress_hook` without its all_reduce. state: number of ranks."""
    buffer = bucket.buffer()
    half = buffer.to(torch.bfloat16).div_(state)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(half)
    return done.then(lambda future: buffer.copy_(future.value()))


def fsdp(task: Task) -> Workload:
    """Each layer and the whole are sharded: all_gather before the forward and backward pass of a layer, then reduce_scatter.

    The fake group copies this rank's shard to the place of every shard, so that computation alone has the copies of all_gather.
    """
    return Workload(
        f"FSDP2 {task.name}",
        task,
        _fsdp,
        batches=_one_for_each_rank,
        traffic=lambda task, size: [("reduce_scatter_tensor", weight_bytes(task))],
    )


def _fsdp(task: Task, means: Means) -> Step:
    model, batch = task.model(), task.batch(means.rank)
    mesh = means.mesh()
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Step(model, lambda: loss(model(batch)).backward())


def _one_for_each_rank(size: int) -> int:
    return size
