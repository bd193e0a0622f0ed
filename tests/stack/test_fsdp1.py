"""FullyShardedDataParallel (FSDP1) on the CPU over MPI trains as one process does on the whole batch.

With one rank FSDP1 shards nothing (NO_SHARD); what is about shards needs two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from tests.stack.meshes import grids
from tests.stack.record import refused_alike
from tests.stack.sharded import (
    TOLERANCE,
    TORCH,
    adam,
    alone,
    backward,
    batch,
    differences,
    gradients,
    loss_of,
    network,
    raised_anywhere,
    sgd,
    share,
    train,
)
from tests.support import agree, everyone

SECTION = "Fully sharded"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*NO_SHARD:FutureWarning", "ignore:FSDP is switching to use `NO_SHARD`:UserWarning"),
    pytest.mark.filterwarnings("ignore:FSDP will not all-gather parameters for containers:UserWarning"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
orig = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig_params"])


def wrapped(model: nn.Module, **options: Any) -> Any:
    """``model`` with each Linear a unit of its own, on the CPU (collective)."""
    options.setdefault("auto_wrap_policy", ModuleWrapPolicy({nn.Linear}))
    return FullyShardedDataParallel(model, device_id=CPU, **options)


def wrong_weights(model: Any, right: nn.Module, tolerance: float = TOLERANCE[torch.float64], rtol: float = 0) -> list[str]:
    """Differences of the whole weights (collective)."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return differences(model.parameters(), right.parameters(), tolerance, rtol)


def wrong_gradients(model: Any, right: list[Tensor], tolerance: float = TOLERANCE[torch.float64], rtol: float = 0) -> list[str]:
    """Differences of the whole gradients, of a model with use_orig_params (collective)."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
        return differences(gradients(model), right, tolerance, rtol)


@pytest.mark.feature("FSDP1 (device_id=cpu): FULL_SHARD, SHARD_GRAD_OP, NO_SHARD; use_orig_params on and off")
@orig
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("dtype", [torch.float64, FP32], ids=["float64", "float32"])
def test_equals_one_process(dtype: torch.dtype, strategy: str, orig: bool, rank: int, size: int) -> None:
    """The flat parameter is padded to a multiple of the world size, and its gathers are list gathers into one buffer."""
    model = wrapped(network(dtype), sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)
    train(model, adam(model.parameters()), range(4), rank, size, dtype)
    bad = wrong_weights(model, alone(4, size, adam, dtype), TOLERANCE[dtype])
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: HYBRID_SHARD, by mesh and by groups")
@orig
@pytest.mark.parametrize("how", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "groups"])
def test_hybrid(how: str, orig: bool, rank: int, size: int) -> None:
    """Reduce-scatter in the rows, all-reduce in the columns. (Rows of one rank: FSDP1 takes NO_SHARD, and no all-reduce.)"""
    bad = []
    strategy = ShardingStrategy["HYBRID_SHARD" if how == "groups" else how]
    for shape in [shape for shape in grids(size, 2) if shape[1] > 1 or size == 1]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        pair = (mesh.get_group("shard"), mesh.get_group("replicate"))
        where: dict[str, Any] = {"process_group": pair} if how == "groups" else {"device_mesh": mesh}
        model = wrapped(network(), sharding_strategy=strategy, use_orig_params=orig, **where)
        train(model, sgd(model.parameters()), range(2), rank, size)
        bad += [f"{shape} {line}" for line in wrong_weights(model, alone(2, size))]
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: mixed precision (param_dtype, reduce_dtype, keep_low_precision_grads)")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(
    ("param", "reduce"),
    [(BF16, None), (BF16, FP32), (FP16, FP32), (None, BF16)],
    ids=["bf16", "bf16-fp32", "fp16-fp32", "fp32-bf16"],
)
def test_mixed_precision(param: torch.dtype | None, reduce: torch.dtype | None, strategy: str, rank: int, size: int) -> None:
    """The gradient is rounded where the policy says so: before, and once after the sum."""
    policy = MixedPrecision(param_dtype=param, reduce_dtype=reduce)
    options = {"mixed_precision": policy, "sharding_strategy": ShardingStrategy[strategy]}
    model = wrapped(network(FP32), auto_wrap_policy=None, use_orig_params=True, **options)
    x, y = batch(0, size, FP32)
    output = model(share(x, rank))
    loss_of(output, share(y, rank).to(output.dtype)).backward()
    computing, reducing = param or FP32, reduce or param or FP32
    total: list[Tensor] = []
    for r in range(size):
        local = network(FP32).to(computing)
        loss_of(local(share(x, r).to(computing)), share(y, r).to(computing)).backward()
        mine = [p.grad.to(reducing).float() for p in local.parameters()]
        total = [a + b for a, b in zip(total, mine, strict=True)] if total else mine
    right = [(t / size).to(reducing).float() for t in total]
    bad = wrong_gradients(model, right, 1e-6, 2 * torch.finfo(reducing).eps if reducing != FP32 else 1e-5)
    agree(not bad and output.dtype == computing, (bad, output.dtype))


@pytest.mark.feature("FSDP1: prefetching, rate limiter off, units by size")
@pytest.mark.parametrize(
    "options",
    [
        {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
        {"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "limit_all_gathers": False},
        {"backward_prefetch": None, "use_orig_params": True},
        {"auto_wrap_policy": lambda *a, **k: size_based_auto_wrap_policy(*a, min_num_params=30, **k)},
    ],
    ids=["pre", "post", "none", "by-size"],
)
def test_options(options: dict[str, Any], rank: int, size: int) -> None:
    """When what is gathered must not change what comes out."""
    model = wrapped(network(), **options)
    train(model, sgd(model.parameters()), range(3), rank, size)
    bad = wrong_weights(model, alone(3, size))
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: prefetching, rate limiter off, units by size")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_offload_pins_memory(request: pytest.FixtureRequest) -> None:
    def call(group: Any) -> None:
        model = wrapped(network(), process_group=group, cpu_offload=CPUOffload(offload_params=True))
        model(torch.ones(2, 6, dtype=torch.float64))

    said = refused_alike("FSDP1: CPUOffload(offload_params=True)", call, request.node, RuntimeError)
    agree("accelerator" in said or "driver" in said, said)  # the latter from a torch that was built for CUDA


@pytest.mark.feature("FSDP1: no_sync (gradient accumulation)")
@orig
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_no_sync(strategy: str, orig: bool, rank: int, size: int) -> None:
    """Gradients gather locally inside no_sync, and meet once outside, or twice."""
    model, reference = wrapped(network(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig), network()
    optimizers = [sgd(m.parameters()) for m in (model, reference)]
    with model.no_sync():
        backward(model, 0, rank, size)
    for step in (1, 2):
        backward(model, step, rank, size)
    for step in range(3):
        backward(reference, step, None, size)
    for optimizer in optimizers:
        optimizer.step()
    bad = wrong_weights(model, reference)
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: clip_grad_norm_")
@orig
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_clips_by_the_norm_over_all_ranks(strategy: str, norm: float, orig: bool, rank: int, size: int) -> None:
    """The ranks' norms are added, or their largest is taken; not so where each rank holds everything."""
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": orig}
    model, reference = wrapped(network(FP32), **options), network(FP32)
    optimizers = [sgd(m.parameters()) for m in (model, reference)]
    backward(model, 0, rank, size, FP32)
    backward(reference, 0, None, size, FP32)
    mine = model.clip_grad_norm_(0.05, norm)
    right = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm)
    for optimizer in optimizers:
        optimizer.step()
    bad = differences([mine], [right], 0, 1e-6) + wrong_weights(model, reference, TOLERANCE[FP32])
    agree(not bad and right > 0.05, (bad, mine, right))


@pytest.mark.feature("FSDP1: summon_full_params (writeback, rank0_only, with_grads)")
@pytest.mark.min_ranks(2)
@orig
def test_summons_full_parameters(orig: bool, rank: int, size: int) -> None:
    """Whole parameters inside; what is written there comes back into the shards only with writeback."""
    model, reference = wrapped(network(), use_orig_params=orig), network()
    summon = FullyShardedDataParallel.summon_full_params
    bad = wrong_weights(model, reference, 0)
    for writeback in (False, True):
        with summon(model, writeback=writeback), torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        with torch.no_grad():
            for p in reference.parameters():
                p.mul_(2 if writeback else 1)
        bad += wrong_weights(model, reference, 0)
    with summon(model, writeback=False, rank0_only=True, offload_to_cpu=TORCH >= (2, 14)):
        shapes = [tuple(p.shape) for p in model.parameters()]
    whole = [tuple(p.shape) for p in reference.parameters()]
    bad += [] if (shapes == whole) == (rank == 0 or size == 1) else [str(shapes)]
    if orig:
        backward(model, 0, rank, size)
        backward(reference, 0, None, size)
        bad += wrong_gradients(model, gradients(reference))
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: summon_full_params (writeback, rank0_only, with_grads)")
@pytest.mark.min_ranks(2)
@pytest.mark.skipif(TORCH >= (2, 14), reason="torch 2.14 mended it")
def test_what_is_on_the_cpu_is_not_offloaded(request: pytest.FixtureRequest) -> None:
    """torch frees on rank 0 what it has "copied" to the CPU."""

    def call(group: Any) -> None:
        model = wrapped(network(), process_group=group, auto_wrap_policy=None)

        def summon() -> None:
            with FullyShardedDataParallel.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
                pass

        raised_anywhere(summon)

    what = "FSDP1: summon_full_params(rank0_only=True, offload_to_cpu=True)"
    said = refused_alike(what, call, request.node, RuntimeError)
    agree("storage" in said, said)


@pytest.mark.feature("FSDP1: meta device with param_init_fn")
@pytest.mark.parametrize("how", ["param_init_fn", "reset_parameters"])
def test_meta_device(how: str, rank: int, size: int) -> None:
    """Modules that do not exist yet are allocated unit by unit."""
    right = network().state_dict()
    with torch.device("meta"):
        model = network()

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.25)

    model = wrapped(model, **({"param_init_fn": fill} if how == "param_init_fn" else {}))
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        filled = all(bool((p == 0.25).all()) for p in model.parameters())
        for p, q in zip(model.parameters(), right.values(), strict=True):
            p.copy_(q)
    train(model, sgd(model.parameters()), range(2), rank, size)
    bad = wrong_weights(model, alone(2, size))
    agree(not bad and (filled or how != "param_init_fn"), bad)


@pytest.mark.feature("FSDP1: ignored_states, frozen parameters")
def test_what_takes_no_part(rank: int, size: int) -> None:
    """Ignored parameters keep the gradients of this rank; frozen ones get none."""
    model, reference, local = network(), network(), network()
    for m in (model, reference, local):
        m[2].requires_grad_(False)
    ignored = [model[3].weight, model[3].bias]
    parallel = wrapped(model, ignored_states=ignored, use_orig_params=True)
    backward(parallel, 0, rank, size)
    backward(reference, 0, None, size)
    backward(local, 0, rank, size)
    right = [
        (a if i in (4, 5) else b).grad for i, (a, b) in enumerate(zip(local.parameters(), reference.parameters(), strict=True))
    ]
    bad = wrong_gradients(parallel, right)
    agree(not bad and right[2] is right[3] is None, bad)


@pytest.mark.feature("FSDP1: communication hooks (reduce_scatter, allreduce)")
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("name", ["reduce_scatter_hook", "allreduce_hook"])
def test_communication_hooks(name: str, rank: int, size: int) -> None:
    """The hook reduces in the place of FSDP, into the shard or in the whole gradient."""
    sharding = ShardingStrategy.NO_SHARD if name == "allreduce_hook" else ShardingStrategy.FULL_SHARD
    model, reference = wrapped(network(FP32), sharding_strategy=sharding, use_orig_params=True), network(FP32)
    model.register_comm_hook(default_hooks.DefaultState(process_group=dist.group.WORLD), getattr(default_hooks, name))
    backward(model, 0, rank, size, FP32)
    backward(reference, 0, None, size, FP32)
    bad = wrong_gradients(model, gradients(reference), TOLERANCE[FP32])
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: communication hooks (reduce_scatter, allreduce)")
def test_compressing_hooks_want_a_stream(rank: int, size: int, request: pytest.FixtureRequest) -> None:
    def call(group: Any) -> None:
        model = wrapped(network(FP32), process_group=group)
        model.register_comm_hook(default_hooks.LowPrecisionState(process_group=group), default_hooks.bf16_compress_hook)
        backward(model, 0, rank, size, FP32)

    what = "FSDP1: fp16_compress_hook, bf16_compress_hook (Tensor.record_stream)"
    said = refused_alike(what, call, request.node, RuntimeError)
    agree(said.startswith("RuntimeError"), said)


@pytest.mark.feature("FSDP1: ShardedGradScaler")
def test_grad_scaler_skips_the_step_on_all_ranks(rank: int, size: int) -> None:
    """An inf that only one rank's shard has seen stops the step on all."""
    model = wrapped(network(FP32))
    optimizer, scaler = sgd(model.parameters()), ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []
    for step in range(2):
        x, y = batch(step, size, FP32)
        optimizer.zero_grad()
        scaler.scale(loss_of(model(share(x, rank)), share(y, rank))).backward()
        if step == 1 and rank == size - 1:
            next(p.grad for p in model.parameters() if p.grad is not None).fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    bad = wrong_weights(model, alone(1, size, sgd, FP32), TOLERANCE[FP32])
    agree(not bad and scales == [16.0, 8.0], (bad, scales))


@pytest.mark.feature("FSDP1 (device_id=cpu): FULL_SHARD, SHARD_GRAD_OP, NO_SHARD; use_orig_params on and off")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_a_device_torch_wants_an_accelerator(request: pytest.FixtureRequest) -> None:
    what = "FullyShardedDataParallel without device_id=torch.device('cpu')"
    said = refused_alike(what, lambda group: FullyShardedDataParallel(network(), group), request.node, RuntimeError)
    agree("accelerator" in said and everyone(said) == [said] * dist.get_world_size(), said)
