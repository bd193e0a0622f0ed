"""What torch cannot do on the CPU, whatever the backend (docs/reference/compatibility.md): it fails alike on MPI and on Gloo."""

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

from tests.stack.refused import refused_alike
from tests.stack.sharded import TORCH, network, raised_anywhere
from tests.support import agree

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*torch.ao.quantization")

CUDA_BUILD = torch.version.cuda is not None or torch.version.hip is not None

on_cpu_alone = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
of_a_cpu_build = pytest.mark.skipif(CUDA_BUILD, reason="a build for CUDA does not mind")
needs_2_13 = pytest.mark.skipif(TORCH < (2, 13), reason="needs torch >= 2.13")


def of(model: nn.Module, group: Any, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model.float(), process_group=group, **options)


def mixed_precision(group: Any) -> None:
    """DDP's own copies parameters on a side stream."""
    half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    of(network(), group, mixed_precision=half)(torch.ones(2, 6))


def sync_batch_norm(group: Any) -> None:
    """Converting works."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), group)
    assert isinstance(model[1], nn.SyncBatchNorm)
    of(model, group)(torch.ones(2, 6))


def bf16_by_its_own_name(group: Any) -> None:
    """A function of one's own that calls it works."""
    of(network(), group).register_comm_hook(group, default_hooks.bf16_compress_hook)


def pinned_offload(group: Any) -> None:
    fully_shard(network(), mesh=DeviceMesh.from_group(group, "cpu"), offload_policy=CPUOffloadPolicy())


def largest_of_nothing(group: Any) -> None:
    """The rank with the empty shard raises, the others would wait for it."""
    weight = fully_shard(nn.Linear(6, 1), mesh=DeviceMesh.from_group(group, "cpu")).weight
    raised_anywhere(lambda: torch.linalg.vector_norm(weight, float("inf")))  # a partial result: nothing is sent


def compiled_nn_functional(group: Any) -> None:
    """It is for eager code."""
    call = torch.compile(lambda x: torch.distributed.nn.functional.all_reduce(x, group=group), backend="eager", fullgraph=True)
    call(torch.ones(2))


def compiled_objects(group: Any) -> None:
    """dynamo fails in torch's own object functions, with and without fullgraph."""

    def function(x: torch.Tensor) -> torch.Tensor:
        factors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(factors, 1, group=group)
        return x * sum(factors)

    torch.compile(function, backend="eager")(torch.ones(2))


ROWS: list[Any] = [  # the call, its error, words of it ("|": or), where it runs
    (mixed_precision, RuntimeError, "", on_cpu_alone),
    (sync_batch_norm, ValueError, "GPU", ()),
    (bf16_by_its_own_name, TypeError, "BF16", of_a_cpu_build),
    (pinned_offload, RuntimeError, "accelerator|driver", on_cpu_alone),  # driver: a torch for CUDA
    (largest_of_nothing, RuntimeError, "empty tensor", pytest.mark.min_ranks(2)),
    (compiled_nn_functional, Exception, "", needs_2_13),
    (compiled_objects, Exception, "", needs_2_13),
]


@pytest.mark.parametrize(
    ("call", "error", "words"), [pytest.param(*values, id=values[0].__name__, marks=marks) for *values, marks in ROWS]
)
def test_refused_on_any_backend(call: Any, error: Any, words: str) -> None:
    """A fault of ours would say something else than Gloo, or nothing."""
    said = refused_alike(call, error)
    agree(any(word in said for word in words.split("|")), said)
