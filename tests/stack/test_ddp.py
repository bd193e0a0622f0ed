"""What is special to DistributedDataParallel: its groups, what it exchanges besides gradients, dtypes and layouts of gradients.

That it trains as one process does, under its options and with any hook, is in test_training.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.stack.sharded import (
    ROWS,
    backward,
    batch,
    bits,
    differences,
    gradients,
    loss_of,
    network,
    same_bits,
    sgd,
    share,
    train,
)
from tests.support import agree, everyone

SECTION = "Data parallel"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:Complex modules"),
]

feature = pytest.mark.feature


def by_ranks(rank: int, size: int) -> dict[str, Any]:
    return {"process_group": [dist.new_group(list(range(odd, size, 2))) for odd in range(min(size, 2))][rank % 2]}


def by_mesh(rank: int, size: int) -> dict[str, Any]:
    columns = 2 if size % 2 == 0 else 1
    return {"device_mesh": init_device_mesh("cpu", (size // columns, columns), mesh_dim_names=("dp", "other"))["dp"]}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(by_ranks, marks=feature("DDP: process_group= a part of the ranks")),
        pytest.param(by_mesh, marks=feature("DDP: device_mesh")),
    ],
    ids=["process_group", "device_mesh"],
)
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hook"])
def test_groups_train_by_themselves(hooked: bool, options: Callable[..., dict[str, Any]], rank: int, size: int) -> None:
    """Even and odd ranks: two models at once, from other weights, on other data; a group's rank 0 is not rank 0."""
    parallel = DistributedDataParallel(model := network(), **options(rank, size))
    group = parallel.process_group
    if hooked:
        parallel.register_comm_hook(group, default_hooks.allreduce_hook)
    members, color = dist.get_world_size(group), min(dist.get_process_group_ranks(group))
    steps = range(10 * color, 10 * color + 3)
    train(parallel, sgd(model.parameters()), steps, dist.get_rank(group), members)
    reference = network()
    train(reference, sgd(reference.parameters()), steps, None, members)
    others = everyone(bits(model.parameters()))
    equal = all(others[r] == others[rank] for r in dist.get_process_group_ranks(group))
    bad = differences(model.parameters(), reference.parameters())
    agree(equal and not bad, bad)


@feature("DDP: different models on the ranks are an error")
@pytest.mark.min_ranks(2)
def test_different_models(rank: int, size: int) -> None:
    """One parameter more on the last rank: all ranks are told, and the group goes on."""
    model: nn.Module = network() if rank < size - 1 else nn.Linear(3, 3).double()
    with pytest.raises(RuntimeError) as refusal:
        DistributedDataParallel(model)
    dist.all_reduce(total := torch.ones(1))
    told = f"Rank {rank} has {len(list(model.parameters()))} params" in str(refusal.value)
    agree(told and total.item() == size, refusal.value)


class Branches(nn.Module):
    """Ranks may go different ways: parameters without gradient, other ones on each rank, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.never = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.branches[way](torch.tanh(self.trunk(x)))  # type: ignore[no-any-return]


@feature("DDP: find_unused_parameters")
@pytest.mark.parametrize("skip", [False, True], ids=["reduce-unused", "skip-unused"])
def test_ranks_take_different_ways(skip: bool, rank: int, size: int) -> None:
    """Other parameters are used on each rank and in each step: who used none of a layer gets the others' mean."""
    model, reference = Branches(), Branches()
    options = {"skip_all_reduce_unused_params": skip, "gradient_as_bucket_view": skip}
    parallel = DistributedDataParallel(model, find_unused_parameters=True, **options)
    wrong: list[Any] = []
    for step in range(4):
        x, y = batch(step, size)
        model.zero_grad()
        reference.zero_grad()
        ways = [(step if skip else step + r) % 2 for r in range(size)]  # what is skipped must be unused by all
        loss_of(parallel(share(x, rank), ways[rank]), share(y, rank)).backward()
        for r in range(size):
            (loss_of(reference(share(x, r), ways[r]), share(y, r)) / size).backward()
        wrong += differences(gradients(model), gradients(reference))
        wrong += [p for p in model.never.parameters() if p.grad is not None]
        for m in (model, reference):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    agree(same_bits(model.parameters()) and not wrong, wrong)


@feature("DDP: buffers from rank 0")
def test_buffers(rank: int, size: int) -> None:
    """BatchNorm's running means: in every forward pass from rank 0's."""
    norm, reference = (nn.BatchNorm1d(6).double() for _ in range(2))
    parallel = DistributedDataParallel(norm)
    for step in range(3):
        x, _ = batch(step, size)
        parallel(share(x, rank)).sum().backward()
        reference(share(x, 0 if step < 2 else rank))
    wrong = [name for (name, b), c in zip(norm.named_buffers(), reference.buffers(), strict=True) if not torch.equal(b, c)]
    agree(not wrong, (wrong, norm.running_mean, reference.running_mean))


class ManyDtypes(nn.Module):
    """Parameters of five dtypes, one more that is frozen, and one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        for name in ("float64", "float32", "float16", "bfloat16", "complex64"):
            dtype = getattr(torch, name)
            values = torch.randn(6, 3, dtype=dtype if dtype.is_complex else torch.float64)
            self.register_parameter(f"of_{name}", nn.Parameter(values.to(dtype)))
        self.frozen = nn.Parameter(torch.randn(6, 3, dtype=torch.float64), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        total = x @ self.frozen + self.empty.sum()
        for name, p in self.named_parameters():
            if name not in ("frozen", "empty"):
                wide = p.to(torch.complex128 if p.is_complex() else torch.float64)
                part = x.to(wide.dtype) @ wide
                total = total + (torch.view_as_real(part).sum(-1) if p.is_complex() else part)
        return total


@feature("DDP: parameters of several dtypes, bf16, fp16 and complex ones")
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_dtypes(views: bool, rank: int, size: int) -> None:
    """One bucket for each dtype; complex gradients reach the backend as they are, from C++ (trap 24)."""
    model, reference = ManyDtypes(), ManyDtypes()
    backward(DistributedDataParallel(model, gradient_as_bucket_view=views), 0, rank, size)
    backward(reference, 0, None, size)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    wrong = []
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if p.requires_grad and not torch.allclose(p.grad, q.grad, rtol=tolerance[p.dtype], atol=tolerance[p.dtype]):  # type: ignore[arg-type]
            wrong.append((name, p.grad, q.grad))
    agree(same_bits(p.grad for p in model.parameters() if p.grad is not None) and not wrong, wrong)


class Words(nn.Module):
    """A table of which few rows are used in a step, and something dense behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table, self.dense = nn.Embedding(20, 6, sparse=True), nn.Linear(6, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.dense(self.table(words).sum(1))  # type: ignore[no-any-return]


def words_of(rank: int, step: int) -> Tensor:
    """ROWS sentences of three words; some words only on some ranks, most of them several times."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 6 + 5 * (rank % 3), (ROWS, 3), generator=generator)


@feature("DDP: sparse gradients (nn.Embedding(sparse=True))")
@pytest.mark.parametrize("hooked", [False, True], ids=["", "hook"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sparse_gradients(dtype: torch.dtype, hooked: bool, rank: int, size: int) -> None:
    """Each rank's gradient has other rows; the mean has them all, and is sparse still. A hook's bucket is the gradient itself."""
    model, reference = Words().to(dtype), Words().to(dtype)
    parallel = DistributedDataParallel(model)
    if hooked:
        parallel.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(3):
        for m in (model, reference):
            m.zero_grad()
        parallel(words_of(rank, step)).square().mean().backward()
        reference(torch.cat([words_of(r, step) for r in range(size)])).square().mean().backward()
        sparse = all(m.table.weight.grad.is_sparse for m in (model, reference))  # type: ignore[union-attr]
        for m in (model, reference):
            torch.optim.SGD(m.parameters(), lr=0.05).step()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    bad = differences(model.parameters(), reference.parameters(), tolerance)
    agree(same_bits(model.parameters()) and sparse and not bad, bad)


@feature("DDP: GradScaler, an overflow on one rank")
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int, size: int) -> None:
    """inf from one rank must come through the sum to everybody, or the replicas part (trap 33)."""
    model = network(torch.float32)
    before = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(0, size, torch.float32)
    loss = loss_of(parallel(share(x, rank)), share(y, rank)) * (float("inf") if rank == size - 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    bad = differences(model.parameters(), before.parameters(), 0)
    agree(not bad and scaler.get_scale() == 2.0, (bad, scaler.get_scale()))
