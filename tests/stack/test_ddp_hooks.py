"""DDP's communication hooks that come with torch: what they do to the mean of gradients, or in its place to the models.

Hooks of one's own are in test_training.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tests.stack.sharded import (
    SMALL,
    backward,
    bits,
    differences,
    gradients,
    network,
    same_bits,
    sgd,
    train,
)
from tests.support import agree

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.ao.quantization")

feature = pytest.mark.feature
FP32 = torch.float32


def reduced(hook: Any, rank: int, size: int, state: Any = None, mb: float = SMALL, group: Any = None) -> list[Tensor]:
    """The gradients of a second step, reduced by the hook: a function, one of torch's in C++, or none."""
    parallel = DistributedDataParallel(network(FP32), bucket_cap_mb=mb, process_group=group)
    if isinstance(hook, dist.BuiltinCommHookType):
        parallel._register_builtin_comm_hook(hook)
    elif hook is not None:
        parallel.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    for step in range(2):
        parallel.zero_grad()
        backward(parallel, step, rank, size, FP32)
    return gradients(parallel)


def local(rank: int, size: int) -> list[Tensor]:
    """What ``rank`` brings to the second of those steps."""
    model = network(FP32)
    backward(model, 1, rank, size, FP32)
    return gradients(model)


@feature("DDP hooks: allreduce_hook, built-in ALLREDUCE")
def test_allreduce_hook(rank: int, size: int) -> None:
    """By None, by the group, and in C++: the same bits; without a hook DDP multiplies by 1/size in place of dividing."""
    hook, built_in = default_hooks.allreduce_hook, dist.BuiltinCommHookType.ALLREDUCE
    hooked = [reduced(hook, rank, size), reduced(hook, rank, size, dist.group.WORLD), reduced(built_in, rank, size)]
    right = [bits(found) == bits(hooked[0]) for found in hooked]
    far = differences(hooked[0], reduced(None, rank, size), 1e-6)
    agree(same_bits(hooked[0]) and all(right) and not far, (right, far))


@feature("DDP hooks: fp16_compress, bf16_compress, their wrappers, built-in FP16_COMPRESS")
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression(name: str, rank: int, size: int) -> None:
    """What every rank's gradient, rounded and divided, sums up to; the sum is rounded once. Likewise a hook in C++."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    hook, wrapper = getattr(default_hooks, f"{name}_compress_hook"), getattr(default_hooks, f"{name}_compress_wrapper")
    compressed = reduced(hook, rank, size)
    others = [reduced(wrapper(default_hooks.allreduce_hook), rank, size)]
    if name == "fp16":
        others.append(reduced(dist.BuiltinCommHookType.FP16_COMPRESS, rank, size))
    parts = [[g.to(dtype).div_(size).float() for g in local(r, size)] for r in range(size)]
    expected = [sum(column).to(dtype).float() for column in zip(*parts, strict=True)]  # type: ignore[union-attr]
    step = torch.finfo(dtype).eps if size > 2 else 0  # the fp32 sum of more than two depends on the order
    far = differences(compressed, expected, 1e-7 if step else 0, step)
    equal = [bits(other) == bits(compressed) for other in others]
    agree(same_bits(compressed) and not far and all(equal), (far, equal))


@feature("DDP hooks: an error in a hook arrives at backward()")
@pytest.mark.parametrize("where", ["hook", "callback"])
def test_an_error_in_a_hook(where: str, rank: int, size: int) -> None:
    """The group goes on."""

    def fails(*_: Any) -> Any:
        raise ArithmeticError("of the hook's own")

    def late(state: Any, bucket: Any) -> Future[Tensor]:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fails)  # type: ignore[no-any-return]

    said = ""
    try:
        reduced(fails if where == "hook" else late, rank, size)
    except Exception as error:  # noqa: BLE001  of which type, torch decides
        said = str(error)
    dist.all_reduce(total := torch.ones(1))
    agree("of the hook's own" in said and total.item() == size, said)


def power(group: Any, **options: Any) -> PowerSGDState:
    standard = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    return PowerSGDState(group, **{**standard, "orthogonalization_epsilon": 1e-8, **options})


def trained(hook: Any, state: Any, group: Any, rank: int, size: int, mb: float = 25) -> nn.Module:
    model = network(FP32, (8, 8, 3))
    model[3] = nn.Tanh()  # with a LayerNorm the gradients of one step lose more in fp16 than the test allows
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=mb)
    if hook is not None:
        parallel.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    train(parallel, torch.optim.SGD(parallel.parameters(), lr=0.05), range(6), rank, size, FP32)
    return parallel


@feature("DDP hooks: PowerSGD")
def test_powersgd_as_gloo_does_it(rank: int, size: int) -> None:
    """Three all-reduces chained in callbacks give the same approximations, step after step: the state remembers errors."""
    gloo = dist.new_group(backend="gloo")
    states = [power(group) for group in (dist.group.WORLD, gloo)]
    model, reference = (trained(powerSGD_hook, state, state.process_group, rank, size) for state in states)
    dist.destroy_process_group(gloo)
    before, after = (state.compression_stats()[1:] for state in states)
    bad = differences(model.parameters(), reference.parameters(), 1e-5)
    approximate = differences(model.parameters(), trained(None, None, None, rank, size).parameters(), 1e-6)
    compressed = before == after and before[0] > before[1] and approximate
    agree(same_bits(model.parameters()) and compressed and not bad, (before, bad))


@feature("DDP hooks: PowerSGD")
@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_powersgd_of_several_buckets(name: str, rank: int, size: int) -> None:
    """The callbacks of one bucket and the all-reduces of the next must come in one order on all ranks, or they would be added
    to each other. With rank 8 nothing is lost, so that the means must come out; in halves by torch's wrappers.
    """
    hook = powerSGD_hook if name == "fp32" else getattr(default_hooks, f"{name}_compress_wrapper")(powerSGD_hook)
    model = trained(hook, power(dist.group.WORLD, matrix_approximation_rank=8), None, rank, size, mb=SMALL)
    tolerance = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}[name]
    bad = differences(model.parameters(), trained(None, None, None, rank, size).parameters(), tolerance)
    agree(same_bits(model.parameters()) and not bad, bad)


@feature("DDP hooks: post_localSGD, with PostLocalSGDOptimizer")
@pytest.mark.parametrize("neighbours", [True, False], ids=["gradients-of-neighbours", "own-gradients"])
def test_post_local_sgd(neighbours: bool, rank: int, size: int) -> None:
    """DDP for two steps; then gradients are averaged among neighbours, or not at all, and models among all, now and then.

    The models of neighbours differ at the end, as they do on Gloo.
    """
    from torch.distributed.optim import PostLocalSGDOptimizer

    start, period, steps, models = 2, 2, 6, []  # the models were averaged before the last step
    pairs = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
    for backend in ("mpi", "gloo"):
        everybody, pair = dist.new_group(backend=backend), [dist.new_group(ranks, backend=backend) for ranks in pairs][rank // 2]
        parallel = DistributedDataParallel(network(), process_group=everybody)
        state = PostLocalSGDState(everybody, pair, start, post_local_gradient_allreduce=neighbours)
        parallel.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period, warmup_steps=start, process_group=everybody)
        optimizer = PostLocalSGDOptimizer(sgd(parallel.parameters()), averager)
        train(parallel, optimizer, range(steps), rank, size)
        models.append(list(parallel.parameters()))
        dist.destroy_process_group(pair)
        dist.destroy_process_group(everybody)
    bad = differences(*models)
    apart = size > (2 if neighbours else 1)
    agree(not bad and averager.step == steps and same_bits(models[0]) != apart, bad)
