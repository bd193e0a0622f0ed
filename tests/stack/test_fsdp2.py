"""What is special to fully_shard (FSDP2): dtypes and operations on the wire, clipping, exceptions, subgroups and meshes.

That it trains as one process does, under its options, is in test_training.py; its state is in test_state_dict.py.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.stack.meshes import grids
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
    sgd,
    sharded,
    share,
    train,
    whole,
)
from tests.support import agree

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_2_13 = pytest.mark.skipif(TORCH < (2, 13), reason="needs torch >= 2.13")

reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # torch 2.13 renamed it


class Watched:
    """A stand-in for FSDP's own reduce-scatter: does the same and notes with which operation and dtype."""

    def __init__(self, model: nn.Sequential) -> None:
        self.seen: list[tuple[str, torch.dtype]] = []
        for module in (model[0], model[2], model):
            module.set_custom_reduce_scatter(self)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.seen.append((str(getattr(op, "op", op)).rsplit(".", 1)[-1], input_tensor.dtype))
        return reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@pytest.mark.min_ranks(2)  # FSDP does not communicate when alone, and divides by the factor twice
@pytest.mark.parametrize("how", ["default", "divide_factor", "force_sum", "force_sum_divide_factor"])
@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=["float32", "float64"])
def test_reductions_of_gradients(dtype: torch.dtype, how: str, rank: int, size: int) -> None:
    """trap 33a: each way of dividing gives the mean, or the sum over the factor, and goes through the operation it names."""
    model, reference = sharded(network(dtype)), network(dtype)
    watched = Watched(model)
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


@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_clips_by_the_norm_over_all_ranks(norm: float, rank: int, size: int) -> None:
    """A norm of the local shards would clip each rank by another factor; the largest element needs MAX, not SUM."""
    widths = (2 * size, size, 3 * size) if norm == float("inf") else (7, 5, 3)  # torch has no largest element of an empty shard
    model, reference = sharded(network(widths=widths)), network(widths=widths)
    x, y = batch(0, size)
    loss_of(model(share(x, rank))[:, :3], share(y, rank)).backward()
    loss_of(reference(x)[:, :3], y).backward()
    mine = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm)
    right = nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm)
    bad = differences([mine, *gradients(model)], [right, *gradients(reference)])
    agree(not bad and right > 0.05, (bad, right))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_evaluates_between_steps(mode: Any, rank: int, size: int) -> None:
    """The gather of an evaluation must see the newest weights and leave none behind that autograd may not use."""
    model = sharded(network())
    optimizer, (x, _) = sgd(model.parameters()), batch(9, size)
    bad = []
    for step in range(3):
        train(model, optimizer, [step], rank, size)
        reference = alone(step + 1, size)
        model.eval()
        with mode():
            bad += differences([model(x)], [reference(x)])
        model.train()
    agree(not bad, bad)


@needs_2_13
def test_goes_on_after_an_exception(rank: int, size: int) -> None:
    """What was gathered for the step that failed must not be used in the next."""
    model = sharded(network())
    optimizer = sgd(model.parameters())
    train(model, optimizer, [0], rank, size)

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    failing = model[2].register_forward_pre_hook(fail, prepend=True)  # layer 0 and the root are gathered by then
    with pytest.raises(ArithmeticError):
        backward(model, 5, rank, size)
    failing.remove()
    model.reset_iter_state()
    train(model, optimizer, range(1, 3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


@pytest.mark.parametrize("dtype", [torch.float64, BF16, pytest.param(torch.int8, marks=needs_2_13)], ids=str)
def test_frozen_parameters(dtype: torch.dtype, rank: int, size: int) -> None:
    """With two dtypes in one group FSDP gathers bytes; what is frozen gets no gradient and keeps every bit."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.base = nn.Parameter((torch.randn(7, 6) * 5).to(dtype), requires_grad=False)
            self.adapter = nn.Linear(6, 7).double()
            self.head = nn.Linear(7, 3).double()
            self.head.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x @ self.base.double().T + self.adapter(x)))  # type: ignore[no-any-return]

    model, reference = fully_shard(Adapter()), Adapter()
    for m, r in ((model, rank), (reference, None)):
        train(m, sgd([p for p in m.parameters() if p.requires_grad]), range(3), r, size)
    bad = differences(model.parameters(), reference.parameters())
    agree(not bad and model.base.grad is None and whole(model.base).dtype == dtype, bad)


def plane(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names or ("replicate", "shard"))


@pytest.mark.parametrize(
    ("param", "reduce", "output"), [(BF16, BF16, FP32), (BF16, FP32, FP32), (FP16, FP32, FP16), (FP16, FP16, FP32)], ids=str
)
def test_mixed_precision(param: torch.dtype, reduce: torch.dtype, output: torch.dtype, rank: int, size: int) -> None:
    """One rounding after the rows, one after the columns: gradients added up in bf16, rank after rank, would lose more."""
    per_rank = []
    for r in range(size):
        local, (x, y) = network(FP32).to(param), batch(0, size, FP32)
        loss_of(local(share(x, r).to(param)).to(output), share(y, r).to(output)).backward()
        per_rank.append([p.grad.to(reduce).float() for p in local.parameters()])
    policies = [MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=o) for o in (None, output)]
    bad = []
    for shape in grids(size, 2):
        model, mesh = network(FP32), plane(shape)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, mp_policy=policies[0])
        watched = Watched(fully_shard(model, mesh=mesh, mp_policy=policies[1]))
        x, y = batch(0, size, FP32)
        answer = model(share(x, rank))
        loss_of(answer, share(y, rank).to(answer.dtype)).backward()
        rows = [torch.stack(found).unflatten(0, shape).mean(1).to(reduce).float() for found in zip(*per_rank, strict=True)]
        right = [row.mean(0).to(reduce).float() for row in rows]
        last = torch.finfo(reduce).eps if shape[0] > 1 or size & (size - 1) or FP16 in (param, reduce) else 0  # 1/3; tiny fp16
        bad += [f"{shape} {line}" for line in differences(gradients(model), right, 1e-7, last)]
        bad += [f"{shape} {dtype}" for dtype in (answer.dtype,) if dtype != output]
        bad += [f"{shape} {dtype}" for _, dtype in watched.seen if dtype != reduce]
    agree(not bad, bad)


@pytest.mark.min_ranks(2)
def test_some_ranks_train_and_others_do_not(rank: int, size: int) -> None:
    """A mesh from a process group that leaves rank 0 out."""
    members = list(range(1, size))
    group = dist.new_group(members)
    bad = []
    if rank in members:
        model = sharded(network(), mesh=DeviceMesh.from_group(group, "cpu"))
        train(model, adam(model.parameters()), range(3), dist.get_rank(group), size - 1)
        bad = differences(model.parameters(), alone(3, size - 1, adam).parameters())
    agree(not bad, bad)
