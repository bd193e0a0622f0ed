"""Tensor parallelism over MPI: parallelize_module's plans train as one process does, alone and beside FSDP2."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from tests.stack.meshes import drawn, grids, share_of, whole
from tests.stack.sharded import differences, same_bits
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
from tests.support import agree

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning"),
]


def square_loss(model: nn.Module, step: int) -> Tensor:
    return whole(model(drawn(4, 6, WIDTH, seed=step))).square().mean()


def trained_alike(model: Any, reference: nn.Module, loss_of: Callable[[nn.Module, int], Tensor] = square_loss) -> None:
    """Three steps of both give the same losses and parameters."""
    losses = steps(model, loss_of), steps(reference, loss_of)
    wrong = differences(model.parameters(), reference.parameters(), 1e-10)
    agree(not wrong and losses[0] == pytest.approx(losses[1]), (wrong, losses))


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


def test_prepare_module(rank: int, size: int) -> None:
    """Inputs come sharded and are needed whole, outputs leave sharded; what is no tensor passes."""
    mesh, module = init_device_mesh("cpu", (size,)), Two()
    a, b = drawn(2 * size, 3, seed=0), drawn(2 * size, 3, seed=1)
    inputs: dict[str, Any] = {
        "input_layouts": (Shard(0), None),
        "desired_input_layouts": (Replicate(), None),
        "input_kwarg_layouts": {"b": Replicate()},
        "desired_input_kwarg_layouts": {"b": Replicate()},
    }
    outputs: dict[str, Any] = {"output_layouts": (Replicate(), Replicate()), "desired_output_layouts": (Shard(0), Shard(1))}
    for plan in (PrepareModuleInput(**inputs, use_local_output=True), PrepareModuleOutput(**outputs)):
        parallelize_module(module, mesh, plan)
    scaled, added = module(a.chunk(size)[rank], 2.0, b=b)
    columns = share_of(a + b, (size,), (rank,), [Shard(1)])
    right = torch.equal(scaled, (2 * a).chunk(size)[rank]) and torch.equal(added, columns)
    agree(right and module.seen == (a.shape, b.shape), (scaled, added))


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


def test_with_fsdp(rank: int, size: int) -> None:
    """Rows over dp, layers over tp: parameters sharded twice, gradients averaged over dp, clipped over all; one process."""
    wrong = []
    for grid in grids(size, 2):
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("dp", "tp"))
        model, reference = (made(lambda: Transformer(size)) for _ in range(2))
        parallelize(model, mesh["tp"], split_logits=False)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"])
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
        for step in range(2):
            rows = tokens(step, 2 * grid[0], 2 * grid[1] + 1)
            norms = []
            for m, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                mine = rows.chunk(grid[0])[mesh.get_local_rank("dp")] if m is model else rows
                language_loss(m, mine).backward()
                norms.append(float(whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1))))
                optimizer.step()
            if norms[0] != pytest.approx(norms[1], rel=1e-9):
                wrong.append((grid, step, norms))
        wrong += [(grid, line) for line in differences(model.parameters(), reference.parameters(), 1e-10)]
    agree(not wrong, wrong[:2])


def test_bfloat16(rank: int, size: int) -> None:
    """Sums over ranks are accumulated in float32 and rounded once; every rank has the same bits."""
    mesh = init_device_mesh("cpu", (size,))
    model, reference = (made(lambda: Perceptron(4 * size)).to(torch.bfloat16) for _ in range(2))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = drawn(5, WIDTH).to(torch.bfloat16)
    found, expected = model(x), reference(x)
    for answer in (found, expected):
        answer.square().sum().backward()
    gradients = model.up.weight.grad.full_tensor(), reference.up.weight.grad
    near = torch.allclose(found, expected, rtol=0.02, atol=0.02) and torch.allclose(*gradients, rtol=0.05, atol=0.05)
    agree(near and same_bits([found]), (found, expected))


# -- the ends of a network ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_parallel(reduction: str, size: int) -> None:
    """Classes that the ranks do not share evenly, ignored rows; loss and gradient."""
    mesh = init_device_mesh("cpu", (size,))
    logits, target = drawn(7, 3 * size - 1), torch.arange(7) % (3 * size - 1)
    target[2] = -100
    plain, sharded = logits.clone().requires_grad_(), distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    expected = F.cross_entropy(plain, target, reduction=reduction)
    expected.sum().backward()
    with loss_parallel():
        loss = F.cross_entropy(sharded, target, reduction=reduction)
        found = loss.full_tensor().detach()
        loss.sum().backward()
    right = torch.allclose(found, expected.detach()) and torch.allclose(sharded.grad.full_tensor(), plain.grad)
    agree(right, (found, expected, sharded.grad, plain.grad))


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
