"""fully_shard's options over MPI: when parameters are gathered and let go, where they lie, and which of them take part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.stack.record import refused_alike
from tests.stack.sharded import (
    TORCH,
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

SECTION = "Fully sharded"

pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")

needs_2_13 = pytest.mark.skipif(TORCH < (2, 13), reason="needs torch >= 2.13")


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def groups(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@pytest.mark.feature("fully_shard: reshard_after_forward True, False, int")
@pytest.mark.parametrize("reshard", [True, False, None])
def test_reshard_after_forward(reshard: bool | None, rank: int, size: int) -> None:
    """Between forward and backward a layer holds its shard (True) or everything (False); the weights come out alike."""
    model = sharded(network(), reshard_after_forward=reshard)
    x, y = batch(0, size)
    output = model(share(x, rank))
    held = [isinstance(layer.weight, DTensor) for layer in (model[0], model[2], model[4])]
    right = {True: [True, True, True], False: [False] * 3, None: [True, True, False]}[reshard]  # None: the root stays whole
    loss_of(output, share(y, rank)).backward()
    reference = network()
    backward(reference, 0, None, size)
    bad = differences(gradients(model), gradients(reference))
    agree(not bad and held == right, (bad, held))


@pytest.mark.feature("fully_shard: reshard_after_forward True, False, int")
@pytest.mark.ranks(4, 8)
def test_reshard_to_a_smaller_world(rank: int, size: int) -> None:
    """With 2, the gather of backward is among pairs of ranks, in groups that FSDP makes itself."""
    model = sharded(network(), reshard_after_forward=2)
    rows = []
    model[0].register_forward_hook(lambda *_: rows.append(model[0].weight.to_local().shape[0]))  # runs after FSDP's own
    train(model, sgd(model.parameters()), range(3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad and rows == [(4, 3)[rank % 2]] * 3, (bad, rows))


@pytest.mark.feature("fully_shard: set_reshard_after_forward, set_reshard_after_backward")
def test_resharding_is_changed_between_steps(rank: int, size: int) -> None:
    """The first forward of the next step must not use weights of before the optimizer's step."""
    model, reference = sharded(network()), network()
    optimizers = [sgd(m.parameters()) for m in (model, reference)]
    for step, (after_forward, after_backward) in enumerate([(False, True), (True, False), (True, True)]):
        model.set_reshard_after_forward(after_forward)
        model.set_reshard_after_backward(after_backward)
        for m, o, r in ((model, optimizers[0], rank), (reference, optimizers[1], None)):
            o.zero_grad()
            backward(m, step, r, size)
        if not after_backward:
            agree(not isinstance(model[0].weight, DTensor), "gathered")
            for group in groups(model):
                group.reshard()
        for o in optimizers:
            o.step()
    bad = differences(model.parameters(), reference.parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: CPUOffloadPolicy(pin_memory=False)")
def test_offload(rank: int, size: int) -> None:
    """Parameters, gradients and optimizer state lie on the CPU, where everything lies: nothing may change."""
    model = sharded(network(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(model, sgd(model.parameters()), range(3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: CPUOffloadPolicy(pin_memory=False)")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_pinned_offload_needs_an_accelerator(request: pytest.FixtureRequest) -> None:
    said = refused_alike(
        "fully_shard: CPUOffloadPolicy(pin_memory=True), the default",
        lambda group: fully_shard(network(), mesh=mesh_of(group), offload_policy=CPUOffloadPolicy()),
        request.node,
        RuntimeError,
    )
    agree("accelerator" in said or "driver" in said, said)  # the latter from a torch that was built for CUDA


@pytest.mark.feature("fully_shard: gradient accumulation (set_requires_gradient_sync, set_is_last_backward)")
@pytest.mark.parametrize("keep", [False, True], ids=["reshard", "stay-gathered"])
@pytest.mark.parametrize("sync", [False, True], ids=["once", "each-time"])
def test_gradients_add_up(sync: bool, keep: bool, rank: int, size: int) -> None:
    """Three micro-batches are one step, whether they are reduced each time or once at the end."""
    model, reference = sharded(network()), network()
    model.set_reshard_after_backward(not keep)
    held = []
    for step in range(3):
        model.set_is_last_backward(step == 2)
        model.set_requires_gradient_sync(sync or step == 2)
        if step == 2:
            model.set_reshard_after_backward(True)
        backward(model, step, rank, size)
        held.append([p.grad is not None for p in model.parameters()])
        backward(reference, step, None, size)
    bad = differences(gradients(model), gradients(reference))
    agree(not bad and (keep or held[:2] == [[sync] * 8] * 2), (bad, held))


@pytest.mark.feature("fully_shard: set_modules_to_forward_prefetch, set_modules_to_backward_prefetch")
@pytest.mark.parametrize("unshard_async", [False, True], ids=["", "async"])
def test_prefetch(unshard_async: bool, rank: int, size: int) -> None:
    """Several gathers under way at once, whose results are taken in another order than they were asked for."""
    model = sharded(network())
    model.set_modules_to_forward_prefetch([model[0], model[2]])
    model[0].set_modules_to_forward_prefetch([model[2]])
    model.set_modules_to_backward_prefetch([model[0], model[2]])
    model[2].set_modules_to_backward_prefetch([model[0]])
    model._set_unshard_async_op(unshard_async)
    train(model, sgd(model.parameters()), range(3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: unshard and reshard by hand, async handle")
def test_unshard_by_hand(rank: int, size: int) -> None:
    """Gathered parameters are the whole ones, and the shard that was changed by hand is what the next gather brings."""
    model, reference = sharded(network()), network()
    handles = [group.unshard(async_op=True) for group in groups(model)]
    for handle in reversed(handles):
        handle.wait()
    bad = differences(model.parameters(), reference.parameters(), 0)
    plain = not any(isinstance(p, DTensor) for p in model.parameters())
    for group in groups(model):
        group.reshard()
    with torch.no_grad():
        for m in (model, reference):
            m[0].weight.mul_(2)
    sharded_again = all(isinstance(p, DTensor) for p in model.parameters())
    model[0].unshard()
    bad += differences([model[0].weight], [reference[0].weight], 0)
    model[0].reshard()
    x, _ = batch(0, size)
    model[2].unshard(async_op=True)  # never waited for: forward does
    bad += differences([model(x)], [reference(x)])
    agree(not bad and plain and sharded_again, bad)


@pytest.mark.feature("fully_shard: frozen parameters, also of another dtype")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, pytest.param(torch.int8, marks=needs_2_13)], ids=str)
def test_frozen_parameters(dtype: torch.dtype, rank: int, size: int) -> None:
    """With two dtypes in one group FSDP gathers bytes; what is frozen gets no gradient and keeps every bit."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.base = nn.Parameter((torch.randn(7, 6) * 5).to(dtype), requires_grad=False)
            self.adapter = nn.Linear(6, 7).double()
            self.head = nn.Linear(7, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x @ self.base.double().T + self.adapter(x)))

    model, reference = fully_shard(Adapter()), Adapter()
    model.head.weight.requires_grad_(False)
    reference.head.weight.requires_grad_(False)
    for m, r in ((model, rank), (reference, None)):
        train(m, sgd([p for p in m.parameters() if p.requires_grad]), range(3), r, size)
    bad = differences(model.parameters(), reference.parameters())
    agree(not bad and model.base.grad is None and whole(model.base).dtype == dtype, bad)


@pytest.mark.feature("fully_shard: shard_placement_fn (Shard(1))")
@pytest.mark.parametrize("depth", [1, 2])
def test_shards_along_another_dimension(depth: int, rank: int, size: int) -> None:
    """The gather concatenates along dim 0; FSDP puts the pieces in their places, forward and backward."""
    torch.manual_seed(6)
    shape = (3, 4 * size, 2) if depth == 1 else (3, 5, 2 * size)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
            self.head = nn.Linear(6, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) * (self.weight * self.weight.cumsum(1).cumsum(2)).sum((1, 2))

    def place(p: nn.Parameter) -> Shard | None:
        return Shard(depth) if p.ndim == 3 else None

    model, reference = fully_shard(Weighted(), shard_placement_fn=place), Weighted()
    for m, r in ((model, rank), (reference, None)):
        train(m, torch.optim.SGD(m.parameters(), lr=1e-3), range(3), r, size)
    bad = differences(model.parameters(), reference.parameters(), 1e-9)
    held = model.weight.to_local()
    mine = torch.equal(held, whole(model.weight).chunk(size, depth)[rank])
    agree(not bad and mine and model.weight.placements == (Shard(depth),), (bad, held.shape))


@pytest.mark.feature("fully_shard: meta device, to_empty, reset_parameters")
def test_meta_device(rank: int, size: int) -> None:
    """The model never exists whole: each rank allocates its shards, draws their numbers, or copies them from elsewhere."""
    with torch.device("meta"):
        layers = [nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)]
        model = sharded(nn.Sequential(*layers).double())
    agree(all(p.is_meta for p in model.parameters()), "meta")
    model.to_empty(device="cpu")
    torch.manual_seed(rank)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    drawn = [whole(p) for p in model.parameters()]
    agree(all(p.isfinite().all() and p.abs().max() <= 1 for p in drawn), drawn)
    with torch.no_grad():
        for p, q in zip(model.parameters(), network().parameters(), strict=True):
            p.copy_(distribute_tensor(q, p.device_mesh, p.placements))
    train(model, sgd(model.parameters()), range(3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: ignored_params")
def test_ignored_parameters(rank: int, size: int) -> None:
    """They stay plain tensors, and nobody averages their gradients."""
    model, reference = network(), network()
    ignored = {model[3].weight, model[3].bias}
    sharded(model, ignored_params=ignored)
    backward(model, 0, rank, size)
    backward(reference, 0, None, size)
    local = network()
    backward(local, 0, rank, size)
    right = [
        (a if i in (4, 5) else b).grad for i, (a, b) in enumerate(zip(local.parameters(), reference.parameters(), strict=True))
    ]
    bad = differences(gradients(model), right)
    agree(not bad and not isinstance(model[3].weight, DTensor), bad)


@pytest.mark.feature("fully_shard: register_fsdp_forward_method")
def test_other_methods_gather_as_well(rank: int, size: int) -> None:
    """A method that is not forward would find shards."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.linear = nn.Linear(6, 3).double()

        def encode(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x))

    model, reference = fully_shard(Coder()), Coder()
    register_fsdp_forward_method(model, "encode")
    x, y = batch(0, size)
    loss_of(model.encode(share(x, rank)), share(y, rank)).backward()
    loss_of(reference.encode(x), y).backward()
    bad = differences(gradients(model), gradients(reference))
    agree(not bad, bad)
