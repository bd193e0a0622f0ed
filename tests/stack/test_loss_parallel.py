"""The ends of a tensor parallel network over MPI: embeddings split over ranks, cross entropy over sharded classes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from tests.stack.meshes import drawn, grids
from tests.support import agree

SECTION = "Tensor and context parallel"
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.mark.feature("loss_parallel: cross entropy over sharded classes")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_parallel(reduction: str, weighted: bool, rank: int, size: int) -> None:
    """Classes that the ranks do not share evenly, ignored rows, class weights; loss and gradient."""
    mesh = init_device_mesh("cpu", (size,))
    logits, target = drawn(7, 3 * size - 1), torch.arange(7) % (3 * size - 1)
    if not weighted:
        target[2] = -100  # torch itself looks its weight up
    weight = drawn(3 * size - 1, seed=2).abs() if weighted else None
    plain = logits.clone().requires_grad_()
    sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    expected = F.cross_entropy(plain, target, weight, reduction=reduction)
    (expected * torch.arange(1, 1 + expected.numel())).sum().backward()
    with loss_parallel():
        placed = None if weight is None else distribute_tensor(weight, mesh, [Replicate()])
        loss = F.cross_entropy(sharded, target, placed, reduction=reduction)
        found = loss.full_tensor().detach()
        if reduction == "none":
            loss = loss * distribute_tensor(torch.arange(1, 8), mesh, [Replicate()])
        loss.sum().backward()
    right = torch.allclose(found, expected.detach()) and torch.allclose(sharded.grad.full_tensor(), plain.grad)
    agree(right, (found, expected, sharded.grad, plain.grad))


@pytest.mark.feature("loss_parallel: cross entropy over sharded classes")
@pytest.mark.skipif(TORCH < (2, 13), reason="needs torch >= 2.13")
def test_loss_parallel_on_a_grid(rank: int, size: int) -> None:
    """Rows over one dimension of the mesh, classes over the other, whichever comes first."""
    wrong = []
    for grid, classes_first, reduction in itertools.product(grids(size, 2), [False, True], ["sum", "none"]):
        mesh = init_device_mesh("cpu", grid)
        logits, target = drawn(8, 3 * size - 1), torch.arange(8) % (3 * size - 1)
        rows, line = (
            ([Shard(1), Shard(0)], [Replicate(), Shard(0)]) if classes_first else ([Shard(0), Shard(1)], [Shard(0), Replicate()])
        )
        plain = logits.clone().requires_grad_()
        sharded = distribute_tensor(logits, mesh, rows).requires_grad_()
        expected = F.cross_entropy(plain, target, reduction=reduction)
        expected.sum().backward()
        with loss_parallel():
            loss = F.cross_entropy(sharded, distribute_tensor(target, mesh, line), reduction=reduction)
            found = loss.full_tensor().detach()
            loss.sum().backward()
        if not (torch.allclose(found, expected) and torch.allclose(sharded.grad.full_tensor(), plain.grad)):
            wrong.append((grid, classes_first, reduction, found, expected))
    agree(not wrong, wrong[:2])


@pytest.mark.feature("embedding split by rows (masked sums) and by columns")
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_embedding(rows: bool, rank: int, size: int) -> None:
    """A vocabulary that the ranks do not share evenly; repeated words, whose gradients add up; the output sharded or whole."""
    mesh = init_device_mesh("cpu", (size,))
    wrong = []
    for output in (Replicate(), Shard(0), Shard(1)):
        model = nn.Embedding(4 * size + 1, 2 * size + 1, dtype=torch.float64)
        reference = copy.deepcopy(model)
        plan = (RowwiseParallel if rows else ColwiseParallel)(
            input_layouts=Replicate(), output_layouts=output, use_local_output=False
        )
        parallelize_module(model, mesh, plan)
        index = torch.randint(4 * size + 1, (2 * size, 5), generator=torch.Generator().manual_seed(1))
        index[0] = 4 * size  # the last word, of the last rank
        weight = drawn(2 * size, 5, 2 * size + 1)
        found, expected = model(index), reference(index)
        (found.full_tensor() * weight).sum().backward()
        (expected * weight).sum().backward()
        if found.placements != (output,) or not torch.equal(found.full_tensor(), expected):
            wrong.append((output, "forward", found))
        if not torch.allclose(model.weight.grad.full_tensor(), reference.weight.grad, rtol=0, atol=1e-12):
            wrong.append((output, "gradient", model.weight.grad))
    agree(not wrong, wrong)
