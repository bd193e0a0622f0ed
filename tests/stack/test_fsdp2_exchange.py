"""How fully_shard talks over MPI: communication of the user's own, buffers and groups, hooks, ranks that take other paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx
from torch.utils.checkpoint import checkpoint as checkpointed

from tests.stack.sharded import (
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
)
from tests.support import agree

SECTION = "Fully sharded"


def since(version: str, method: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not hasattr(FSDPModule, method), reason=f"needs torch >= {version}")


def groups(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Gather:
    """An all-gather of the user's own: one broadcast from each rank, into buffers of its own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(size, 7, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        blocks = list(output_tensor.chunk(group.size()))
        return dist.all_gather(blocks, input_tensor, group=group, async_op=async_op)


class Scatter:
    """A reduce-scatter of the user's own: all-reduce, and keep one block."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(size, 7, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        dist.all_reduce(input_tensor, op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


@pytest.mark.feature("fully_shard: set_custom_all_gather, set_custom_reduce_scatter")
def test_communication_of_ones_own(rank: int, size: int) -> None:
    """The blocks of all_gather are slices of one buffer, one of which the input is (trap 34)."""
    model = sharded(network())
    for group in groups(model):
        group.set_custom_all_gather(Gather())
        group.set_custom_reduce_scatter(Scatter())
    train(model, sgd(model.parameters()), range(3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: set_allocate_memory_from_process_group_for_comm")
def test_buffers_from_the_process_group(rank: int, size: int) -> None:
    """torch asks the backend whether it has memory of its own; it must answer."""
    model = sharded(network())
    for group in groups(model):
        group.set_allocate_memory_from_process_group_for_comm(True)
    train(model, sgd(model.parameters()), range(3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: set_separate_reduce_scatter_group")
@since("2.13", "set_separate_reduce_scatter_group")
def test_two_groups_of_the_same_ranks(rank: int, size: int) -> None:
    """Gathers and reduce-scatters may be under way at once, each in the order of its own group."""
    model = sharded(network())
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_modules_to_backward_prefetch([model[0], model[2]])
    model._set_unshard_async_op(True)
    train(model, sgd(model.parameters()), range(3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


class Branches(nn.Module):
    """Uses `first` or `second`, in one group of parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = nn.Linear(6, 3).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.first if which == 0 else self.second)(x)


@pytest.mark.feature("fully_shard: set_reduce_scatter_unused_params (ranks take different branches)")
@since("2.13", "set_reduce_scatter_unused_params")
def test_ranks_take_different_branches(rank: int, size: int) -> None:
    """Without zeros for what a rank has not used, ranks would reduce-scatter buffers of different layouts."""
    model, reference = fully_shard(Branches()), Branches()
    model.set_reduce_scatter_unused_params(True)
    x, y = batch(0, size)
    loss_of(model(share(x, rank), rank % 2), share(y, rank)).backward()
    for r in range(size):
        (loss_of(reference(share(x, r), r % 2), share(y, r)) / size).backward()
    right = [torch.zeros_like(p) if p.grad is None else p.grad for p in reference.parameters()]
    bad = differences(gradients(model), right)
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: activation checkpointing (wrapper, composable, torch.utils.checkpoint)")
@pytest.mark.parametrize("how", ["wrapper", "composable", "utils", "utils-reentrant"])
def test_activation_checkpointing(how: str, rank: int, size: int) -> None:
    """The forward that backward repeats gathers again, in the same order on all ranks."""
    model = network()
    if how == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        for i in (0, 2):
            fully_shard(model[i])
        fully_shard(model)
    elif how == "composable":
        for i in (0, 2):
            fully_shard(checkpoint(model[i]))
        fully_shard(model)
    else:

        class Repeating(nn.Module):
            def __init__(self, layers: nn.Sequential) -> None:
                super().__init__()
                self.layers = layers

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = checkpointed(layer, x, use_reentrant=how == "utils-reentrant")
                return x

        for i in (0, 2, 4):
            fully_shard(model[i])
        model = fully_shard(Repeating(model))
    for step in range(2):
        x, y = batch(step, size)
        loss_of(model(share(x, rank).requires_grad_()), share(y, rank)).backward()
    reference = network()
    for step in range(2):
        backward(reference, step, None, size)
    bad = differences(gradients(model), gradients(reference))
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: several modules as one group, two roots sharing their communication")
def test_modules_in_one_group(rank: int, size: int) -> None:
    """One gather for all of them, at the first forward of any."""
    model = network()
    fully_shard([model[0], model[2]])
    fully_shard([model[3], model[4]])
    first, second = model[:3], model[3:]
    fully_shard(first)
    fully_shard(second)
    share_comm_ctx([first, second])
    reference = network()
    for m, r in ((nn.Sequential(first, second), rank), (reference, None)):
        train(m, adam(m.parameters()), range(3), r, size)
    bad = differences(model.parameters(), reference.parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: optimizer step in backward (register_post_accumulate_grad_hook)")
def test_steps_in_backward(rank: int, size: int) -> None:
    """The hook runs while other groups are still being reduced: its parameter's gradient must be all there."""
    model = sharded(network())
    optimizers = {p: sgd([p]) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for number in range(3):
        backward(model, number, rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


class Halved(torch.Tensor):
    """A shard that travels in bf16, with a scale beside it: FSDP's extension for quantised gathers."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Halved:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        keep = {"split", "clone", "new_zeros", "slice", "copy_", "view", "as_strided", "_to_copy", "empty_like", "detach"}
        if func._schema.name.split("::")[-1] in keep:
            return torch.utils._pytree.tree_map_only(torch.Tensor, cls, out)
        return out

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Halved:
        return Halved(inner["inner"])

    def fsdp_pre_all_gather(  # FSDP counts the arguments
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.inner.bfloat16(), torch.ones(self.inner.shape[0], dtype=torch.uint8)), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Tensor | None = None) -> Any:
        values, ones = outputs
        agreed = values.to(param_dtype) * ones.to(param_dtype)[: values.shape[0], None]
        if out is None:
            return agreed, (agreed,)
        out.copy_(agreed)
        return None


@pytest.mark.feature("fully_shard: tensor subclass with fsdp_pre_all_gather")
@pytest.mark.min_ranks(2)
def test_gathers_in_another_form(rank: int, size: int) -> None:
    """What is gathered is bf16 and bytes together; each must arrive as it was, and gradients go the plain way."""
    widths = (2 * size, size, 3)
    model, reference = network(widths=widths), network(widths=widths)
    with torch.no_grad():
        reference[0].weight.copy_(reference[0].weight.bfloat16())
    model[0].weight = nn.Parameter(Halved(model[0].weight.detach()))
    sharded(model)
    backward(model, 0, rank, size)
    backward(reference, 0, None, size)
    first = gradients(model)[0].to_local()
    first = first.inner if isinstance(first, Halved) else first
    bad = differences(gradients(model)[1:], gradients(reference)[1:])
    bad += differences([first], [reference[0].weight.grad.chunk(size)[rank]])
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: goes on after an exception (reset_iter_state)")
@since("2.13", "reset_iter_state")
def test_goes_on_after_an_exception(rank: int, size: int) -> None:
    """What was gathered for the step that failed must not be used in the next."""
    model = sharded(network())
    optimizer = sgd(model.parameters())
    train(model, optimizer, [0], rank, size)
    x, y = batch(5, size)

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    failing = model[2].register_forward_pre_hook(fail, prepend=True)  # layer 0 and the root are gathered by then
    try:
        loss_of(model(share(x, rank)), share(y, rank)).backward()
    except ArithmeticError:
        failing.remove()
    model.reset_iter_state()
    train(model, optimizer, range(1, 3), rank, size)
    bad = differences(model.parameters(), alone(3, size).parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: finalize_backward(async_op=True)")
@since("2.15", "finalize_backward")
def test_backward_is_finalised_by_hand(rank: int, size: int) -> None:
    """The gradients of two backwards are reduced when the program says so, behind a handle."""
    model, reference = sharded(network()), network()
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        backward(model, step, rank, size)
        backward(reference, step, None, size)
    model.set_requires_gradient_sync(True)
    model.finalize_backward(async_op=True).wait()
    bad = differences(gradients(model), gradients(reference))
    agree(not bad, bad)
