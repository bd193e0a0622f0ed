"""DistributedDataParallel under each of its options equals one process on the whole batch, and the replicas stay equal."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.stack import replicas
from tests.stack.replicas import Branches, apart, batch, close, gradients_apart, loss_of, network, same_bits, share, train
from tests.support import agree, everyone

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

SMALL = 100 / 2**20  # MiB; each bucket takes one or two tensors
feature = pytest.mark.feature


def ddp_has(option: str) -> bool:
    return option in inspect.signature(DistributedDataParallel).parameters


def optional(option: str, since: str) -> Any:
    return pytest.mark.skipif(not ddp_has(option), reason=f"needs torch >= {since}")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=feature("DDP equals one process")),
        pytest.param({"bucket_cap_mb": SMALL}, id="buckets", marks=feature("DDP: many buckets, rebuilt in the order of use")),
        pytest.param(
            {"bucket_cap_mb_list": [SMALL, 3 * SMALL]},
            id="bucket-list",
            marks=feature("DDP: many buckets, rebuilt in the order of use"),
        ),
        pytest.param({"static_graph": True}, id="static", marks=feature("DDP: static_graph")),
        pytest.param({"gradient_as_bucket_view": True}, id="views", marks=feature("DDP: gradient_as_bucket_view")),
        pytest.param(
            {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
            id="static-views-buckets",
            marks=feature("DDP: static_graph"),
        ),
        pytest.param({"find_unused_parameters": True}, id="unused", marks=feature("DDP: find_unused_parameters")),
        pytest.param(
            {"batched_grad_copy": True},
            id="batched-copy",
            marks=[feature("DDP: batched_grad_copy, lazy_bucket_allocation"), optional("batched_grad_copy", "2.13")],
        ),
        pytest.param(
            {"lazy_bucket_allocation": True, "bucket_cap_mb": SMALL},
            id="lazy-buckets",
            marks=[feature("DDP: batched_grad_copy, lazy_bucket_allocation"), optional("lazy_bucket_allocation", "2.15")],
        ),
    ],
)
def test_equals_one_process(options: dict[str, Any], rank: int, size: int) -> None:
    """Five steps of SGD with momentum: any gradient that is not the mean of all ranks' shows."""
    reference = train(network(), 5, size)
    model = network() if rank == 0 else network(seed=rank)  # DDP hands rank 0's weights round
    parallel = DistributedDataParallel(model, **options)
    train(parallel, 5, size, rank)
    agree(same_bits(model) and close(model, reference), apart(model, reference))


@feature("DDP: gradient_as_bucket_view")
def test_gradients_are_views_of_the_buckets(rank: int, size: int) -> None:
    """All-reduced in place: .grad and the bucket are one memory, and stay it over zero_grad(set_to_none=False)."""
    model, reference = network(), network()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for step in range(3):
        x, y = batch(step, size)
        for m, a, b in ((parallel, share(x, rank), share(y, rank)), (reference, x, y)):
            m.zero_grad(set_to_none=False)
            loss_of(m(a), b).backward()
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    agree(len(storages) == 1 and not gradients_apart(model, reference), gradients_apart(model, reference))


@feature("DDP: many buckets, rebuilt in the order of use")
def test_buckets_are_rebuilt(rank: int, size: int) -> None:
    """After the first backward DDP sorts its buckets by the order in which gradients came, by a broadcast from rank 0."""
    torch.manual_seed(2)
    layers = [nn.Linear(replicas.WIDE, replicas.WIDE) for _ in range(4)]

    class Backwards(nn.Module):
        """Declares its layers in the opposite order to their use."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(reversed(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x))
            return x[:, : replicas.NARROW]

    model = Backwards().double()
    reference = Backwards().double()
    reference.load_state_dict(model.state_dict())
    parallel = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    before = parallel._get_ddp_logging_data()["bucket_sizes"]
    train(parallel, 4, size, rank)
    train(reference, 4, size)
    data = parallel._get_ddp_logging_data()
    rebuilt = data["has_rebuilt_buckets"] == 1 and data["rebuilt_bucket_sizes"].count(",") > 0
    agree(same_bits(model) and rebuilt and close(model, reference), (before, data["rebuilt_bucket_sizes"]))


@feature("DDP: find_unused_parameters")
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("skip", [False, True], ids=["reduce-unused", "skip-unused"])
def test_ranks_take_different_ways(skip: bool, views: bool, rank: int, size: int) -> None:
    """Other parameters are used on each rank and in each step: who used none of a layer gets the others' mean."""
    model, reference = Branches(), Branches()
    parallel = DistributedDataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=views, skip_all_reduce_unused_params=skip
    )
    wrong: list[Any] = []
    for step in range(4):
        x, y = batch(step, size)
        model.zero_grad()
        reference.zero_grad()
        way = (lambda r, step=step: step % 2) if skip else (lambda r, step=step: (r + step) % 2)  # skipped: unused by all
        loss_of(parallel(share(x, rank), way(rank)), share(y, rank)).backward()
        for r in range(size):
            (loss_of(reference(share(x, r), way(r)), share(y, r)) / size).backward()
        wrong += gradients_apart(model, reference)
        wrong += [p for p in model.never.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in [*model.parameters(), *reference.parameters()]:
                p -= 0.1 * (p.grad if p.grad is not None else 0)
    agree(same_bits(model) and not wrong, wrong)


@feature("DDP: static_graph")
def test_static_graph_with_unused_parameters(rank: int, size: int) -> None:
    """A layer that is never used needs no search of the graph: the first pass finds it."""
    model, reference = Branches(), Branches()
    parallel = DistributedDataParallel(model, static_graph=True)
    for step in range(3):
        x, y = batch(step, size)
        for m, a, b in ((parallel, share(x, rank), share(y, rank)), (reference, x, y)):
            m.zero_grad()
            loss_of(m(a, 1), b).backward()
    agree(not gradients_apart(model, reference), gradients_apart(model, reference))


@feature("DDP: no_sync (gradient accumulation)")
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_accumulates_under_no_sync(options: dict[str, Any], rank: int, size: int) -> None:
    """Three backward passes without communication, then one with: the sum of the four means."""
    model, reference = network(), network()
    parallel = DistributedDataParallel(model, bucket_cap_mb=SMALL, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    unequal = []
    for big in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(4):
            x, y = batch(4 * big + micro, size)
            loss_of(reference(x), y).backward()
            if micro < 3:
                with parallel.no_sync():
                    loss_of(parallel(share(x, rank)), share(y, rank)).backward()
                first = next(model.parameters()).grad
                assert first is not None
                unequal.append(first.sum().item())
            else:
                loss_of(parallel(share(x, rank)), share(y, rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
    local = size == 1 or len({str(values) for values in everyone(unequal)}) == size  # nothing was exchanged before
    agree(same_bits(model) and local and close(model, reference), apart(model, reference))


@feature("DDP: buffers from rank 0 (forward_sync_buffers, broadcast_buffers)")
@pytest.mark.parametrize("sync", [True, False], ids=["sync", "local"])
def test_buffers(sync: bool, rank: int, size: int) -> None:
    """BatchNorm's running means: in every forward pass from rank 0's, or each rank its own all along."""
    steps = 3
    norm, reference = (nn.BatchNorm1d(replicas.WIDE).double() for _ in range(2))
    option = "forward_sync_buffers" if ddp_has("forward_sync_buffers") else "broadcast_buffers"
    parallel = DistributedDataParallel(norm, **{option: sync})
    for step in range(steps):
        x, _ = batch(step, size)
        parallel(share(x, rank)).sum().backward()
        reference(share(x, 0 if sync and step < steps - 1 else rank))
    wrong = [name for (name, b), c in zip(norm.named_buffers(), reference.buffers(), strict=True) if not torch.equal(b, c)]
    agree(not wrong, (wrong, norm.running_mean, reference.running_mean))
