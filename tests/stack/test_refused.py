"""What torch cannot do on the CPU, whatever the backend: calls that fail alike on MPI and on Gloo, for a table in docs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from tests.stack.record import refused_alike
from tests.stack.sharded import TORCH, network, raised_anywhere
from tests.support import agree

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*torch.ao.quantization")

FP32 = torch.float32
DATA, FULLY, COMPILED = "Data parallel", "Fully sharded", "Functional collectives and torch.compile"
CUDA_BUILD = torch.version.cuda is not None or torch.version.hip is not None

on_cpu_alone = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
of_a_cpu_build = pytest.mark.skipif(CUDA_BUILD, reason="a build for CUDA does not mind")
needs_2_13 = pytest.mark.skipif(TORCH < (2, 13), reason="needs torch >= 2.13")

ROWS = []


def refused(section: str, feature: str, what: str, error: type[Exception], words: str = "", *marks: Any) -> Any:
    """A row: the decorated function gets a group, raises ``error``, and says one of the ``words``, which "|" parts."""

    def keep(call: Callable[[Any], None]) -> None:
        marks_of_all = [pytest.mark.feature(feature, section=section), *marks]
        ROWS.append(pytest.param(what, call, error, words, id=call.__name__, marks=marks_of_all))

    return keep


def of(model: nn.Module, group: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, **options)


STREAMS = "DDP: mixed_precision"


@refused(DATA, STREAMS, "DDP(mixed_precision=...)", RuntimeError, "", on_cpu_alone)
def mixed_precision(group: Any) -> None:
    """DDP's own copies parameters on a side stream."""
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    parallel = of(network(FP32), group, mixed_precision=half)
    parallel(torch.ones(2, 6)).sum().backward()


@refused(DATA, "SyncBatchNorm", "SyncBatchNorm", ValueError, "GPU")
def sync_batch_norm(group: Any) -> None:
    """Converting works."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), group)
    assert isinstance(model[1], nn.SyncBatchNorm)
    of(model, group)(torch.ones(2, 6))


COMPRESSION = "DDP hooks: fp16_compress, bf16_compress, their wrappers, built-in FP16_COMPRESS"


@refused(DATA, COMPRESSION, "register_comm_hook(bf16_compress_hook) in a build without CUDA", TypeError, "BF16", of_a_cpu_build)
def bf16_by_its_own_name(group: Any) -> None:
    """A function of one's own that calls it works."""
    of(network(FP32), group).register_comm_hook(group, default_hooks.bf16_compress_hook)


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


OFFLOAD, PINNED = "fully_shard: CPUOffloadPolicy(pin_memory=False)", "fully_shard: CPUOffloadPolicy(pin_memory=True), the default"


@refused(FULLY, OFFLOAD, PINNED, RuntimeError, "accelerator|driver", on_cpu_alone)  # driver: a torch built for CUDA
def pinned_offload(group: Any) -> None:
    fully_shard(network(), mesh=mesh_of(group), offload_policy=CPUOffloadPolicy())


CLIPPING = "fully_shard: gradient clipping (clip_grad_norm_ with norms 2, inf)"
EMPTY = "fully_shard: clip_grad_norm_(norm_type=inf) where a rank's shard is empty"


@refused(FULLY, CLIPPING, EMPTY, RuntimeError, "empty tensor", pytest.mark.min_ranks(2))
def largest_of_nothing(group: Any) -> None:
    """The rank with the empty shard raises, the others would wait for it."""
    weight = fully_shard(nn.Linear(6, 1), mesh=mesh_of(group)).weight
    raised_anywhere(lambda: torch.linalg.vector_norm(weight, float("inf")))  # a partial result: nothing is sent


IN_COMPILED = "compiled functions: what torch refuses, as on Gloo"


@refused(COMPILED, IN_COMPILED, "torch.distributed.nn.functional under torch.compile", Exception, "", needs_2_13)
def compiled_nn_functional(group: Any) -> None:
    """It is for eager code."""
    call = torch.compile(lambda x: torch.distributed.nn.functional.all_reduce(x, group=group), backend="eager", fullgraph=True)
    call(torch.ones(2))


@refused(COMPILED, IN_COMPILED, "all_gather_object and the like in a compiled function", Exception, "", needs_2_13)
def compiled_objects(group: Any) -> None:
    """dynamo fails in torch's own object functions, with and without fullgraph."""

    def function(x: torch.Tensor) -> torch.Tensor:
        factors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(factors, 1, group=group)
        return x * sum(factors)

    torch.compile(function, backend="eager")(torch.ones(2))


@pytest.mark.parametrize(("what", "call", "error", "words"), ROWS)
def test_refused_on_any_backend(what: str, call: Any, error: Any, words: str, request: pytest.FixtureRequest) -> None:
    """A fault of ours would say something else than Gloo, or nothing."""
    said = refused_alike(what, call, request.node, error)
    agree(any(word in said for word in words.split("|")), said)
