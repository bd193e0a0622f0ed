"""Tensor parallelism over MPI: parallelize_module's plans train as one process does; piece by piece and as a whole."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from tests.stack.meshes import drawn, share_of, whole
from tests.stack.sharded import differences
from tests.stack.transformers import (
    WIDTH,
    Perceptron,
    Transformer,
    language_loss,
    made,
    parallelize,
    steps,
    tokens,
)
from tests.support import agree, everyone

SECTION = "Tensor and context parallel"
PLANS = "parallelize_module: ColwiseParallel, RowwiseParallel"
LOSS = "loss_parallel: cross entropy over sharded classes"
LENGTH = 6  # tokens per rank where sequences are split

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


def square_loss(model: nn.Module, step: int) -> Tensor:
    return whole(model(drawn(4, 6, WIDTH, seed=step))).square().mean()


def trained_alike(model: Any, reference: nn.Module, loss_of: Callable[[nn.Module, int], Tensor] = square_loss) -> None:
    """Three steps of both give the same losses and parameters."""
    losses = steps(model, loss_of), steps(reference, loss_of)
    wrong = differences(model.parameters(), reference.parameters(), 1e-10)
    agree(not wrong and losses[0] == pytest.approx(losses[1]), (wrong, losses))


@pytest.mark.feature(PLANS)
@pytest.mark.parametrize("uneven", [0, 1], ids=["even", "uneven"])
def test_perceptron(uneven: int, rank: int, size: int) -> None:
    """Columns, then rows: one all_reduce forward, one backward; hidden units that the ranks do not share evenly as well."""
    model, reference = (made(lambda: Perceptron(4 * size + uneven)) for _ in range(2))
    mesh = init_device_mesh("cpu", (size,))
    up = ColwiseParallel(use_local_output=not uneven)  # torch guesses the whole size from a local tensor, as if all had as much
    parallelize_module(model, mesh, {"up": up, "down": RowwiseParallel()})
    placements = [model.up.weight.placements, model.up.bias.placements, model.down.weight.placements, model.down.bias.placements]
    agree(placements == [(Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)], placements)
    trained_alike(model, reference)


@pytest.mark.feature("CommDebugMode counts the collectives")
@pytest.mark.min_ranks(2)
def test_collectives_are_counted(rank: int, size: int) -> None:
    """One all_reduce in the forward of a column-row pair, and one in its backward."""
    model = made(lambda: Perceptron(4 * size))
    parallelize_module(model, init_device_mesh("cpu", (size,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = drawn(3, WIDTH).requires_grad_()
    with CommDebugMode() as forward:
        loss = model(x).sum()
    with CommDebugMode() as backward:
        loss.backward()
    counts = [mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce] for mode in (forward, backward)]
    agree(counts == [1, 1] and forward.get_total_counts() == 1, counts)


@pytest.mark.feature("tensor parallel under torch.compile")
@pytest.mark.slow
def test_compiled(rank: int, size: int) -> None:
    """aot_eager, fullgraph: the collectives of the plan find MPI's groups by name inside the graph."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))["tp"]
    model, reference = (made(lambda: Perceptron(4 * size)) for _ in range(2))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    trained_alike(model, reference, lambda m, step: square_loss(compiled if m is model else m, step))


class Two(nn.Module):
    """Two inputs, one by keyword, two outputs."""

    def forward(self, a: Tensor, scale: float, *, b: Tensor) -> tuple[Tensor, Tensor]:
        self.seen = (a.shape, b.shape)
        return a * scale, a + b


@pytest.mark.feature("parallelize_module: PrepareModuleInput, PrepareModuleOutput")
def test_prepare_module(rank: int, size: int) -> None:
    """Inputs come sharded and are needed whole, outputs leave sharded; what is no tensor passes."""
    mesh = init_device_mesh("cpu", (size,))
    a, b = drawn(2 * size, 3, seed=0), drawn(2 * size, 3, seed=1)
    inputs: dict[str, Any] = {
        "input_layouts": (Shard(0), None),
        "desired_input_layouts": (Replicate(), None),
        "input_kwarg_layouts": {"b": Replicate()},
        "desired_input_kwarg_layouts": {"b": Replicate()},
    }
    outputs: dict[str, Any] = {"output_layouts": (Replicate(), Replicate()), "desired_output_layouts": (Shard(0), Shard(1))}
    joint = PrepareModuleInputOutput(**inputs, **outputs, use_local_input=True, use_local_output=True)
    found = []
    for plans in ([PrepareModuleInput(**inputs, use_local_output=True), PrepareModuleOutput(**outputs)], [joint]):
        module = Two()
        for plan in plans:
            parallelize_module(module, mesh, plan)
        scaled, added = module(a.chunk(size)[rank], 2.0, b=b)
        right = torch.equal(scaled, (2 * a).chunk(size)[rank]) and torch.equal(
            added, share_of(a + b, (size,), (rank,), [Shard(1)])
        )
        found.append((right, module.seen))
    agree(all(right and seen == (a.shape, b.shape) for right, seen in found), found)


@pytest.mark.feature("attention: heads shared out")
@pytest.mark.feature("parallelize_module: SequenceParallel")
@pytest.mark.feature("a transformer: embedding, sequence parallel blocks, loss parallel")
@pytest.mark.parametrize("split_logits", [False, True], ids=["whole-logits", "loss-parallel"])
def test_transformer(split_logits: bool, rank: int, size: int) -> None:
    """Vocabulary by rows, heads, hidden units and tokens by rank, logits by class: three steps equal one process's."""
    mesh = init_device_mesh("cpu", (size,))
    model, reference = (made(lambda: Transformer(size)) for _ in range(2))
    parallelize(model, mesh, split_logits)

    def loss_of(m: nn.Module, step: int) -> Tensor:
        return language_loss(m, tokens(step, 3, 2 * size + 1))

    with loss_parallel() if split_logits else contextlib.nullcontext():
        losses = steps(model, loss_of)
    expected, wrong = steps(reference, loss_of), differences(model.parameters(), reference.parameters(), 1e-10)
    agree(not wrong and losses == pytest.approx(expected), (wrong, losses, expected))


@pytest.mark.feature("tensor parallel in bfloat16")
def test_bfloat16(rank: int, size: int) -> None:
    """Sums over ranks are accumulated in float32 and rounded once; every rank has the same bits."""
    mesh = init_device_mesh("cpu", (size,))
    model, reference = (made(lambda: Perceptron(4 * size)).to(torch.bfloat16) for _ in range(2))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = drawn(5, WIDTH).to(torch.bfloat16)
    found, expected = model(x), reference(x)
    found.square().sum().backward()
    expected.square().sum().backward()
    bits = everyone(found.detach().view(torch.int16))
    near = torch.allclose(found, expected, rtol=0.02, atol=0.02) and torch.allclose(
        model.up.weight.grad.full_tensor(), reference.up.weight.grad, rtol=0.05, atol=0.05
    )
    agree(
        near and all(torch.equal(other, bits[0]) for other in bits) and Partial() not in model.up.weight.grad.placements,
        (found, expected),
    )


# -- the ends of a network ---------------------------------------------------------------------------------------------


@pytest.mark.feature(LOSS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_parallel(reduction: str, weighted: bool, size: int) -> None:
    """Classes that the ranks do not share evenly, ignored rows, class weights; loss and gradient."""
    mesh = init_device_mesh("cpu", (size,))
    logits, target = drawn(7, 3 * size - 1), torch.arange(7) % (3 * size - 1)
    if not weighted:
        target[2] = -100  # torch itself looks its weight up
    weight = drawn(3 * size - 1, seed=2).abs() if weighted else None
    placed = None if weight is None else distribute_tensor(weight, mesh, [Replicate()])
    plain, sharded = logits.clone().requires_grad_(), distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    expected = F.cross_entropy(plain, target, weight, reduction=reduction)
    (expected * torch.arange(1, 1 + expected.numel())).sum().backward()
    with loss_parallel():
        loss = F.cross_entropy(sharded, target, placed, reduction=reduction)
        found = loss.full_tensor().detach()
        if reduction == "none":
            loss = loss * distribute_tensor(torch.arange(1, 8), mesh, [Replicate()])
        loss.sum().backward()
    right = torch.allclose(found, expected.detach()) and torch.allclose(sharded.grad.full_tensor(), plain.grad)
    agree(right, (found, expected, sharded.grad, plain.grad))


@pytest.mark.feature("embedding split by rows (masked sums) and by columns")
@pytest.mark.parametrize("style", [RowwiseParallel, ColwiseParallel], ids=["rows", "columns"])
def test_embedding(style: Any, size: int) -> None:
    """A vocabulary that the ranks do not share evenly; repeated words, whose gradients add up; the output sharded or whole."""
    mesh = init_device_mesh("cpu", (size,))
    wrong: list[Any] = []
    for output in (Replicate(), Shard(0), Shard(1)):
        model = nn.Embedding(4 * size + 1, 2 * size + 1, dtype=torch.float64)
        reference = copy.deepcopy(model)
        parallelize_module(model, mesh, style(input_layouts=Replicate(), output_layouts=output, use_local_output=False))
        index = torch.randint(4 * size + 1, (2 * size, 5), generator=torch.Generator().manual_seed(1))
        index[0] = 4 * size  # the last word, of the last rank
        weight = drawn(2 * size, 5, 2 * size + 1)
        found, expected = model(index), reference(index)
        for answer in (found.full_tensor(), expected):
            (answer * weight).sum().backward()
        wrong += [] if found.placements == (output,) and torch.equal(found.full_tensor(), expected) else [(output, found)]
        near = torch.allclose(model.weight.grad.full_tensor(), reference.weight.grad, rtol=0, atol=1e-12)
        wrong += [] if near else [(output, "gradient", model.weight.grad)]
    agree(not wrong, wrong)
