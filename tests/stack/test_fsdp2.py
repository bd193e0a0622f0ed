"""fully_shard (FSDP2) over MPI trains as one process does on the whole batch: dtypes, reductions, mixed precision, optimizers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.stack.record import refused_alike
from tests.stack.sharded import (
    TOLERANCE,
    TORCH,
    MakeOptimizer,
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
    sharded,
    share,
    train,
    whole,
)
from tests.support import agree

SECTION = "Fully sharded"

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 renamed it


class Watched:
    """A stand-in for FSDP's own reduce-scatter: does the same and notes with which operation and dtype."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, torch.dtype]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.seen.append((str(getattr(op, "op", op)).rsplit(".", 1)[-1], input_tensor.dtype))
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def watch(model: nn.Sequential) -> Watched:
    watched = Watched()
    for module in (model[0], model[2], model):
        module.set_custom_reduce_scatter(watched)
    return watched


@pytest.mark.feature("fully_shard: equal to one process on the whole batch, shards of uneven sizes")
@pytest.mark.parametrize("make", [sgd, adam], ids=["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float64, FP32], ids=["float64", "float32"])
def test_equals_one_process_on_the_whole_batch(dtype: torch.dtype, make: MakeOptimizer, rank: int, size: int) -> None:
    """A gather in another order, or a padded row that leaks, would change the weights."""
    model = sharded(network(dtype))
    train(model, make(model.parameters()), range(4), rank, size, dtype)
    bad = differences(model.parameters(), alone(4, size, make, dtype).parameters(), TOLERANCE[dtype])
    held = model[4].weight.to_local().shape[0]  # 3 rows: nothing is left for the last of four ranks
    chunk = -(-3 // size)
    agree(not bad and held == max(0, min(chunk, 3 - chunk * rank)), (bad, held))


@pytest.mark.feature("fully_shard: Adam on DTensors, foreach, fused and one by one")
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=["foreach", "fused", "single"])
def test_optimizers_work_on_shards(options: dict[str, bool], rank: int, size: int) -> None:
    """The optimizer's state is sharded as its parameter is, and the step is that of one process."""
    make = partial(torch.optim.Adam, lr=0.02, eps=1e-3, **options)
    model = sharded(network())
    optimizer = make(model.parameters())
    train(model, optimizer, range(3), rank, size)
    bad = differences(model.parameters(), alone(3, size, make).parameters())
    state = [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    agree(not bad and all(isinstance(s, DTensor) and s.placements == (Shard(0),) for s in state), (bad, state))


@pytest.mark.feature("fully_shard: reduce_scatter AVG (the default), PREMUL_SUM, SUM")
@pytest.mark.min_ranks(2)  # FSDP does not communicate when alone, and divides by the factor twice
@pytest.mark.parametrize("how", ["default", "divide_factor", "force_sum", "force_sum_divide_factor"])
@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=["float32", "float64"])
def test_reductions_of_gradients(dtype: torch.dtype, how: str, rank: int, size: int) -> None:
    """trap 33a: each way of dividing gives the mean, or the sum over the factor, and goes through the operation it names."""
    model, reference = sharded(network(dtype)), network(dtype)
    watched = watch(model)
    factor = 5.0 if "factor" in how else None
    for module in (model[0], model[2], model):
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        if "force_sum" in how:
            module.set_force_sum_reduction_for_comms(True)
    backward(model, 0, rank, size, dtype)
    backward(reference, 0, None, size, dtype)
    right = [p.grad * (size / factor if factor else 1) for p in reference.parameters()]
    bad = differences(gradients(model), right, TOLERANCE[dtype])
    expected = {"default": "AVG", "divide_factor": "PREMUL_SUM"}.get(how, "SUM") if dtype == FP32 else "SUM"
    agree(not bad and watched.seen == [(expected, dtype)] * 3, (bad, watched.seen))


def rounded_alike(size: int, param: torch.dtype, reduce: torch.dtype, output: torch.dtype | None = None) -> list[Tensor]:
    """One process's gradients with every rounding that the policy promises, and no other."""
    total: list[Tensor] = []
    for r in range(size):
        model = network(FP32).to(param)
        x, y = batch(0, size, FP32)
        answer = model(share(x, r).to(param))
        loss_of(answer.to(output or param), share(y, r).to(output or param)).backward()
        mine = [p.grad.to(reduce).float() for p in model.parameters()]
        total = [a + b for a, b in zip(total, mine, strict=True)] if total else mine
    return [(t / size).to(reduce).float() for t in total]


@pytest.mark.feature("fully_shard: mixed precision (bf16, fp16; param_dtype, reduce_dtype, output_dtype)")
@pytest.mark.parametrize(
    ("param", "reduce", "output"),
    [(BF16, None, None), (BF16, FP32, FP32), (BF16, BF16, FP32), (FP16, FP32, None), (FP16, None, FP32)],
    ids=["bf16", "bf16-fp32-fp32", "bf16-bf16-fp32", "fp16-fp32", "fp16-fp16-fp32"],
)
def test_mixed_precision(
    param: torch.dtype, reduce: torch.dtype | None, output: torch.dtype | None, rank: int, size: int
) -> None:
    """bf16 gradients that are added up in bf16, rank after rank, lose more than the one rounding that is promised."""
    layers = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    reducing = reduce or (FP32 if TORCH >= (2, 15) else param)  # torch 2.15 changed what None means
    model = network(FP32)
    for layer in (model[0], model[2]):
        fully_shard(layer, mp_policy=layers)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output))
    watched = watch(model)
    x, y = batch(0, size, FP32)
    answer = model(share(x, rank))
    loss_of(answer, share(y, rank).to(answer.dtype)).backward()
    last = torch.finfo(reducing).eps if size & (size - 1) or FP16 in (param, reducing) else 0  # 1/3, or a tiny fp16
    bad = differences(gradients(model), rounded_alike(size, param, reducing, output), 1e-7, last)
    moved = all(dtype == reducing for _, dtype in watched.seen)
    agree(not bad and moved and answer.dtype == (output or param), (bad, watched.seen, answer.dtype))


@pytest.mark.feature("fully_shard: models in bf16 and fp16")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_models_of_half_precision(dtype: torch.dtype, rank: int, size: int) -> None:
    """No policy: parameters, gradients and optimizer state are all of the small dtype."""
    model, reference = sharded(network(dtype)), network(dtype)
    optimizer = sgd(model.parameters())
    backward(model, 0, rank, size, dtype)
    eps = torch.finfo(dtype).eps
    right = [gradient.to(dtype) for gradient in rounded_alike(size, dtype, dtype)]
    bad = differences(gradients(model), right, 1e-7, eps)
    for p, gradient in zip(reference.parameters(), gradients(model), strict=True):
        p.grad = whole(gradient)
    optimizer.step()
    sgd(reference.parameters()).step()
    bad += differences(model.parameters(), reference.parameters(), eps / 2)  # a shard ends in another vector lane: an ulp
    agree(not bad, bad)


CLIPPING = "fully_shard: gradient clipping (clip_grad_norm_ with norms 1, 2, 3, inf)"


@pytest.mark.feature(CLIPPING)
@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0, float("inf")])
def test_clips_by_the_norm_over_all_ranks(norm: float, foreach: bool, rank: int, size: int) -> None:
    """A norm of the local shards would clip each rank by another factor; the largest element needs MAX, not SUM."""
    widths = (2 * size, size, 3 * size) if norm == float("inf") else (7, 5, 3)  # see the next test
    model, reference = sharded(network(widths=widths)), network(widths=widths)
    x, y = batch(0, size)
    loss_of(model(share(x, rank))[:, :3], share(y, rank)).backward()
    loss_of(reference(x)[:, :3], y).backward()
    mine = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm, foreach=foreach)
    right = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm)
    bad = differences([mine, *gradients(model)], [right, *gradients(reference)])
    agree(not bad and right > 0.05, (bad, right))


@pytest.mark.feature(CLIPPING)
@pytest.mark.min_ranks(2)
def test_the_largest_element_of_an_empty_shard(request: pytest.FixtureRequest) -> None:
    """torch has no largest element of nothing; the rank with the empty shard raises, the others would wait for it."""

    def call(group: Any) -> None:
        weight = fully_shard(nn.Linear(6, 1), mesh=DeviceMesh.from_group(group, "cpu")).weight
        raised_anywhere(lambda: torch.linalg.vector_norm(weight, float("inf")))  # a partial result: nothing is sent

    what = "fully_shard: clip_grad_norm_(norm_type=inf) where a rank's shard is empty"
    said = refused_alike(what, call, request.node, RuntimeError)
    agree("empty tensor" in said, said)


@pytest.mark.feature("fully_shard: torch.amp.GradScaler")
def test_grad_scaler_skips_the_step_on_all_ranks(rank: int, size: int) -> None:
    """An inf in one rank's data, or in one rank's shard alone, must stop the step everywhere, or replicas part."""
    model = sharded(network(FP32))
    optimizer, scaler = sgd(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales, weights = [], []
    for step in range(3):
        x, y = batch(step, size, FP32)
        if step == 1 and rank == size - 1:
            x = x * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss_of(model(share(x, rank)), share(y, rank))).backward()
        if step == 2 and rank == 0:
            model[0].weight.grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        weights.append(whole(model[0].weight).detach().clone())
    right = torch.equal(weights[0], weights[1]) and torch.equal(weights[1], weights[2])
    agree(right and scales == [16.0, 8.0, 4.0], scales)
    agree(not differences(model.parameters(), alone(1, size, sgd, FP32).parameters(), TOLERANCE[FP32]), "step 0")


@pytest.mark.feature("fully_shard: evaluation under no_grad and inference_mode, between steps of training")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluates_between_steps(mode: Any, rank: int, size: int) -> None:
    """The gather of an evaluation must see the newest weights and leave none behind that autograd may not use."""
    model, reference = sharded(network()), network()
    optimizers = [sgd(m.parameters()) for m in (model, reference)]
    x, _ = batch(9, size)
    bad = []
    for step in range(3):
        train(model, optimizers[0], [step], rank, size)
        train(reference, optimizers[1], [step], None, size)
        model.eval()
        with mode():
            bad += differences([model(x)], [reference(x)])
        model.train()
    agree(not bad, bad)
