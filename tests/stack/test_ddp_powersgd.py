"""PowerSGD over DDP: three all-reduces chained in callbacks, beside Gloo, and by itself where Gloo cannot be trusted."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.stack.record import refused_alike
from tests.stack.replicas import apart, batch, close, loss_of, network, same_bits, share
from tests.support import agree

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

START, STEPS = 2, 6
SMALL = 100 / 2**20  # MiB
feature = pytest.mark.feature


@pytest.fixture(scope="module")
def gloo() -> Iterator[Any]:
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


def state_for(group: Any, **options: Any) -> PowerSGDState:
    standard = {"matrix_approximation_rank": 1, "start_powerSGD_iter": START, "min_compression_rate": 0.5}
    return PowerSGDState(group, **{**standard, "orthogonalization_epsilon": 1e-8, **options})


def trained(hook: Any, state: Any, group: Any, rank: int, size: int, mb: float = 25, steps: int = STEPS) -> nn.Module:
    model = network(dtype=torch.float32)
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=mb)
    if hook is not None:
        parallel.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x, y = batch(step, size, torch.float32)
        optimizer.zero_grad()
        loss_of(parallel(share(x, rank)), share(y, rank)).backward()
        optimizer.step()
    return model


@feature("DDP hooks: PowerSGD")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"matrix_approximation_rank": 2},
        {"use_error_feedback": False, "warm_start": False},
        {"batch_tensors_with_same_shape": True},
    ],
    ids=["rank-1", "rank-2", "no-feedback", "batched-shapes"],
)
def test_as_gloo_does_it(options: dict[str, Any], gloo: Any, rank: int, size: int) -> None:
    """The same approximations of the same gradients, step after step: error feedback and warm start remember."""
    states = [state_for(group, **options) for group in (dist.group.WORLD, gloo)]
    model, reference = (trained(powerSGD_hook, state, state.process_group, rank, size) for state in states)
    before, after = (state.compression_stats()[1:] for state in states)
    compressed = before == after and before[0] > before[1]
    agree(same_bits(model) and compressed and close(model, reference, 1e-5), (before, apart(model, reference, 1e-5)))


@feature("DDP hooks: PowerSGD")
def test_exact_before_it_starts(rank: int, size: int) -> None:
    """start_powerSGD_iter plain all-reduces, the same bits as allreduce_hook's; then something else."""
    world = dist.group.WORLD
    plain = trained(default_hooks.allreduce_hook, world, world, rank, size, steps=START)
    early = trained(powerSGD_hook, state_for(world), world, rank, size, steps=START)
    later = trained(powerSGD_hook, state_for(world), world, rank, size)
    differs = not close(later, trained(None, None, world, rank, size), 1e-6)
    agree(close(early, plain, 0) and differs, apart(early, plain, 0))


@feature("DDP hooks: PowerSGD")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_several_buckets(dtype: torch.dtype, rank: int, size: int) -> None:
    """The callbacks of one bucket and the all-reduces of the next must come in one order on all ranks, or they would be added
    to each other. With rank 8 nothing is lost, so that the means must come out; in halves by torch's wrappers.
    """
    wrappers = {torch.float16: default_hooks.fp16_compress_wrapper, torch.bfloat16: default_hooks.bf16_compress_wrapper}
    chosen = wrappers[dtype](powerSGD_hook) if dtype in wrappers else powerSGD_hook

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses the bf16 wrapper by its name
        return chosen(state, bucket)

    world = dist.group.WORLD
    whole = trained(hook, state_for(world, matrix_approximation_rank=8), world, rank, size, mb=SMALL)
    reference = trained(None, None, world, rank, size)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    agree(same_bits(whole) and close(whole, reference, tolerance), apart(whole, reference, tolerance))


@feature("DDP hooks: batched PowerSGD")
def test_batched_powersgd_is_broken(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """It hands a matrix to a function that asserts a batch of matrices, once its plain all-reduces are over."""

    def call(group: Any) -> None:
        trained(batched_powerSGD_hook, state_for(group), group, rank, size)

    said = refused_alike("batched_powerSGD_hook", call, request.node, AssertionError)
    agree(said, said)


@feature("DDP hooks: PowerSGD")
def test_state_is_saved_and_restored(rank: int, size: int) -> None:
    """The group stays behind; the restored state takes the default one, which is ours."""
    world = dist.group.WORLD
    state = state_for(world)
    trained(powerSGD_hook, state, world, rank, size, steps=4)
    restored = pickle.loads(pickle.dumps(state))
    same = restored.process_group is world and restored.iter == state.iter == 4
    errors = zip(restored.error_dict.values(), state.error_dict.values(), strict=True)
    agree(same and all(torch.equal(a, b) for a, b in errors), restored.iter)
