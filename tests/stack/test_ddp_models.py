"""DDP with models of every kind: dtypes, layouts, sparse gradients, checkpointing, several passes, gradients of gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.stack import replicas
from tests.stack.record import refused_alike
from tests.stack.replicas import (
    ROWS,
    WIDE,
    apart,
    batch,
    close,
    gradients_apart,
    loss_of,
    network,
    same_bits,
    share,
)  # fmt: skip
from tests.support import agree

SECTION = "Data parallel"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant"),
    pytest.mark.filterwarnings("ignore:Complex modules"),
]

SMALL = 100 / 2**20  # MiB
feature = pytest.mark.feature


class ManyDtypes(nn.Module):
    """Parameters of five dtypes, one more that is frozen, and one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        for name in ("float64", "float32", "float16", "bfloat16", "complex64"):
            dtype = getattr(torch, name)
            values = torch.randn(WIDE, 3, dtype=dtype if dtype.is_complex else torch.float64)
            self.register_parameter(f"of_{name}", nn.Parameter(values.to(dtype)))
        self.frozen = nn.Parameter(torch.randn(WIDE, 3, dtype=torch.float64), requires_grad=False)
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
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=views)
    x, y = batch(0, size)
    loss_of(parallel(share(x, rank)), share(y, rank)).backward()
    loss_of(reference(x), y).backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    wrong = [
        (name, p.grad, q.grad)
        for (name, p), q in zip(model.named_parameters(), reference.named_parameters(), strict=True)
        if p.requires_grad and not torch.allclose(p.grad, q[1].grad, rtol=tolerance[p.dtype], atol=tolerance[p.dtype])  # type: ignore[arg-type]
    ]
    agree(same_bits(p.grad for p in model.parameters() if p.grad is not None) and not wrong, wrong)


@feature("DDP: parameters of several dtypes, bf16, fp16 and complex ones")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_models_stay_equal(dtype: torch.dtype, rank: int, size: int) -> None:
    """trap 32: halves are rounded on the way; every replica must round alike, step after step."""
    model = network(dtype=dtype)
    parallel = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    replicas.train(parallel, 5, size, rank)
    reference = replicas.train(network(dtype=torch.float32), 5, size)
    agree(same_bits(model) and close(model.float(), reference, 0.1), apart(model.float(), reference))


@feature("DDP: convolutions in channels_last")
def test_channels_last(rank: int, size: int) -> None:
    """Dense weights whose strides are not row-major: broadcast at the start, reduced in a bucket of the same strides."""

    def made() -> nn.Sequential:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
        return net.double().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    model, reference = made(), made().eval()
    if rank:
        for p in model.parameters():
            p.data.zero_()
    parallel = DistributedDataParallel(model.eval(), gradient_as_bucket_view=True)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2 * size, 3, 5, 5, generator=generator, dtype=torch.float64).to(memory_format=torch.channels_last)
    parallel(images[2 * rank : 2 * rank + 2]).square().mean().backward()
    reference(images).square().mean().backward()
    wrong = [*apart(model, reference), *gradients_apart(model, reference)]
    strides = [p.grad.stride() == p.stride() for p in model.parameters() if p.grad is not None]
    agree(not wrong and all(strides), (wrong, strides))


class Words(nn.Module):
    """A table of which few rows are used in a step, and something dense behind it."""

    def __init__(self, kind: type[nn.Embedding] | type[nn.EmbeddingBag], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = kind(20, WIDE, sparse=True, **({"mode": "sum"} if kind is nn.EmbeddingBag else {}))
        self.dense = nn.Linear(WIDE, 2)
        self.to(dtype)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.table(words)
        return self.dense(rows if rows.dim() == 2 else rows.sum(1))  # type: ignore[no-any-return]


def words_of(rank: int, step: int) -> Tensor:
    """ROWS sentences of three words; some words only on some ranks, most of them several times."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 6 + 5 * (rank % 3), (ROWS, 3), generator=generator)


@feature("DDP: sparse gradients (nn.Embedding(sparse=True), SparseAdam)")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sparse_gradients(dtype: torch.dtype, kind: Any, rank: int, size: int) -> None:
    """Each rank's gradient has other rows; the mean has them all, and is sparse still."""
    model, reference = Words(kind, dtype), Words(kind, dtype)
    parallel = DistributedDataParallel(model)
    adam = dtype != torch.bfloat16  # SparseAdam's state is fp32
    pairs = []
    for m in (model, reference):
        table = (torch.optim.SparseAdam if adam else torch.optim.SGD)(m.table.parameters(), lr=0.05)
        pairs.append((table, torch.optim.SGD(m.dense.parameters(), lr=0.05)))
    for step in range(3):
        for optimizer in (o for pair in pairs for o in pair):
            optimizer.zero_grad()
        parallel(words_of(rank, step)).square().mean().backward()
        reference(torch.cat([words_of(r, step) for r in range(size)])).square().mean().backward()
        assert model.table.weight.grad is not None
        sparse = model.table.weight.grad.is_sparse
        for optimizer in (o for pair in pairs for o in pair):
            optimizer.step()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    agree(same_bits(model) and sparse and close(model, reference, tolerance), apart(model, reference, tolerance))


@feature("DDP: sparse gradients (nn.Embedding(sparse=True), SparseAdam)")
def test_sparse_gradients_through_a_hook(rank: int, size: int) -> None:
    """The hook's bucket is the sparse gradient itself."""
    model, reference = Words(nn.Embedding, torch.float64), Words(nn.Embedding, torch.float64)
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, default_hooks.allreduce_hook)
    parallel(words_of(rank, 0)).square().mean().backward()
    reference(torch.cat([words_of(r, 0) for r in range(size)])).square().mean().backward()
    agree(not gradients_apart(model, reference), gradients_apart(model, reference))


@feature("DDP: activation checkpointing")
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("static", [True, False], ids=["static_graph", "dynamic"])
def test_activation_checkpointing(static: bool, reentrant: bool, rank: int, size: int) -> None:
    """The forward pass runs again inside the backward pass; with a layer checkpointed twice the graph must be static."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Tensor) -> Tensor:
            x = self.net[0](x)
            for layer in self.net[1:4]:
                x = checkpoint(layer, x, use_reentrant=reentrant)  # type: ignore[assignment]
            if static:
                x = checkpoint(self.net[2], x, use_reentrant=reentrant)  # type: ignore[assignment]
            return self.net[4](x)  # type: ignore[no-any-return]

    model, reference = Checkpointed(), Checkpointed()
    parallel = DistributedDataParallel(model, static_graph=static, bucket_cap_mb=SMALL)
    replicas.train(parallel, 3, size, rank)
    replicas.train(reference, 3, size)
    agree(same_bits(model) and close(model, reference), apart(model, reference))


@feature("DDP: several forward passes, gradient penalty (double backward)")
def test_two_forward_passes_one_backward(rank: int, size: int) -> None:
    """As with two views of one image: both passes feed one loss."""
    model, reference = network(), network()
    parallel = DistributedDataParallel(model)
    for step in range(3):
        x, y = batch(step, size)
        for m, a, b in ((parallel, share(x, rank), share(y, rank)), (reference, x, y)):
            m.zero_grad()
            (loss_of(m(a), b) + loss_of(m(2 * a), -b)).backward()
    agree(not gradients_apart(model, reference), gradients_apart(model, reference))


@feature("DDP: several forward passes, gradient penalty (double backward)")
def test_gradient_penalty(rank: int, size: int) -> None:
    """The loss holds the gradient by the input; DDP reduces in the outer backward pass alone."""
    model, reference = network(), network()
    parallel = DistributedDataParallel(model)
    for step in range(3):
        x, y = batch(step, size)
        for m, a, b in ((parallel, share(x, rank), share(y, rank)), (reference, x, y)):
            m.zero_grad()
            a = a.clone().requires_grad_()
            output = m(a)
            (slope,) = torch.autograd.grad(output.sum(), a, create_graph=True)
            (loss_of(output, b) + slope.square().mean()).backward()
    agree(not gradients_apart(model, reference, 1e-11), gradients_apart(model, reference, 1e-11))


@feature("DDP: autocast to bf16, GradScaler")
def test_autocast(rank: int, size: int) -> None:
    """Weights and gradients are fp32, the arithmetic between is bf16; the scaler's inf check sees reduced gradients."""
    model, reference = network(dtype=torch.float32), network(dtype=torch.float32)
    parallel = DistributedDataParallel(model)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x, y = batch(step, size, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            mine, whole = loss_of(parallel(share(x, rank)).float(), share(y, rank)), loss_of(reference(x).float(), y)
        optimizer.zero_grad()
        plain.zero_grad()
        scaler.scale(mine).backward()
        whole.backward()
        scaler.step(optimizer)
        scaler.update()
        plain.step()
    agree(same_bits(model) and close(model, reference, 5e-3), apart(model, reference, 5e-3))


@feature("DDP: autocast to bf16, GradScaler")
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int, size: int) -> None:
    """inf from one rank must come through the sum to everybody, or the replicas part (trap 33)."""
    model = network(dtype=torch.float32)
    before = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(0, size, torch.float32)
    loss = loss_of(parallel(share(x, rank)), share(y, rank)) * (float("inf") if rank == size - 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    agree(close(model, before, 0) and scaler.get_scale() == 2.0, scaler.get_scale())


@feature("DDP: layers of one weight, lists and dicts in and out")
def test_tied_weights_and_nested_outputs(rank: int, size: int) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(11)
            self.first, self.second = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
            self.second.weight = self.first.weight
            self.double()

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
            hidden = torch.tanh(self.first(inputs["x"]))
            return {"outputs": [self.second(hidden), (hidden,)], "name": "tied"}

    model, reference = Tied(), Tied()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)  # which looks for tensors in the outputs
    for step in range(2):
        x, _ = batch(step, size)
        for m, a in ((parallel, share(x, rank)), (reference, x)):
            m.zero_grad()
            out = m({"x": a})["outputs"]
            (out[0].square().mean() + out[1][0].abs().mean()).backward()
    agree(not gradients_apart(model, reference), gradients_apart(model, reference))


@feature("DDP: gradients of a batch that is empty on a rank")
def test_an_empty_share(rank: int, size: int) -> None:
    """The last rank has no rows; a sum in place of a mean needs no weights."""
    model, reference = network(), network()
    parallel = DistributedDataParallel(model)
    x, y = batch(0, size)
    rows = 0 if rank == size - 1 else ROWS
    mine = parallel(share(x, rank)[:rows])
    (mine - share(y, rank)[:rows]).square().sum().backward()
    kept = ROWS * (size - 1)
    ((reference(x[:kept]) - y[:kept]).square().sum() / size).backward()
    agree(not gradients_apart(model, reference), gradients_apart(model, reference))


@feature("SyncBatchNorm")
def test_sync_batch_norm_is_for_gpus(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """torch refuses CPU inputs before it communicates; converting works."""

    def call(group: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDE, 3), nn.BatchNorm1d(3))
        model = nn.SyncBatchNorm.convert_sync_batchnorm(net, group)
        assert isinstance(model[1], nn.SyncBatchNorm)
        DistributedDataParallel(model, process_group=group)(torch.ones(2, WIDE))

    said = refused_alike("SyncBatchNorm", call, request.node, ValueError)
    agree("GPU" in said, said)
