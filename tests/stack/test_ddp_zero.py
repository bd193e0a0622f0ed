"""ZeroRedundancyOptimizer: each rank keeps the state of its share of the parameters, and together they step like one process.

Its two hooks that overlap the step with the backward pass are not for Gloo, which may hang in them: callbacks that broadcast
must run in one order on all ranks. Ours do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.stack import replicas
from tests.stack.replicas import apart, batch, close, loss_of, network, same_bits, share, train
from tests.support import agree, everyone

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*TorchScript:DeprecationWarning")

SMALL = 100 / 2**20  # MiB
feature = pytest.mark.feature
Maker = tuple[type[torch.optim.Optimizer], dict[str, Any]]
SGD: Maker = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
ADAMW: Maker = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})
RMSPROP: Maker = (torch.optim.RMSprop, {"lr": 0.01})
makers = pytest.mark.parametrize("maker", [SGD, ADAMW, RMSPROP], ids=["SGD", "AdamW", "RMSprop"])


def zero(parameters: Any, maker: Maker, **options: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer_class=maker[0], **options, **maker[1])


def plain(parameters: Any, maker: Maker) -> torch.optim.Optimizer:
    return maker[0](parameters, **maker[1])


@feature("ZeroRedundancyOptimizer")
@makers
@pytest.mark.parametrize("views", [False, True], ids=["each-parameter", "parameters_as_bucket_view"])
def test_steps_like_one_process(views: bool, maker: Maker, rank: int, size: int) -> None:
    """And no rank keeps state for more than its own parameters; each parameter's is on one rank."""
    model, reference = network(), network()
    optimizer = zero(model.parameters(), maker, parameters_as_bucket_view=views)
    train(DistributedDataParallel(model), 4, size, rank, optimizer)
    train(reference, 4, size, optimizer=plain(reference.parameters(), maker))
    kept = sum(everyone(len(optimizer.optim.state)))
    right = same_bits(model) and close(model, reference, 1e-9) and kept == len(list(model.parameters()))
    agree(right, (kept, apart(model, reference, 1e-9)))


@feature("ZeroRedundancyOptimizer: parameter groups, several optimizers, schedulers")
def test_parameter_groups(rank: int, size: int) -> None:
    """Groups of other learning rates, one of them added later, all changed by a scheduler."""
    models = [network(), network()]
    wrapped = [DistributedDataParallel(models[0]), models[1]]
    optimizers = []
    for model in models:
        groups = [{"params": list(model[0].parameters()), "lr": 0.2}, {"params": list(model[2].parameters())}]
        optimizers.append(zero(groups, SGD) if model is models[0] else plain(groups, SGD))
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    for step in range(4):
        if step == 2:
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.05})
        x, y = batch(step, size)
        for m, a, b, optimizer in zip(wrapped, (share(x, rank), x), (share(y, rank), y), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(m(a), b).backward()
            optimizer.step()
        for scheduler in schedulers:
            if step < 2:
                scheduler.step()
    model, reference = models
    agree(same_bits(model) and close(model, reference, 1e-9), apart(model, reference, 1e-9))


@feature("ZeroRedundancyOptimizer: parameter groups, several optimizers, schedulers")
def test_two_optimizers(rank: int, size: int) -> None:
    """Adam for one part of the model, SGD for the other, both sharded."""
    model, reference = network(), network()
    parallel = DistributedDataParallel(model)
    mine = [zero(model[:3].parameters(), ADAMW), zero(model[3:].parameters(), SGD, parameters_as_bucket_view=True)]
    whole = [plain(reference[:3].parameters(), ADAMW), plain(reference[3:].parameters(), SGD)]
    for step in range(3):
        x, y = batch(step, size)
        for m, a, b, optimizers in ((parallel, share(x, rank), share(y, rank), mine), (reference, x, y, whole)):
            m.zero_grad()
            loss_of(m(a), b).backward()
            for optimizer in optimizers:
                optimizer.step()
    agree(same_bits(model) and close(model, reference, 1e-9), apart(model, reference, 1e-9))


@feature("ZeroRedundancyOptimizer: consolidate_state_dict, load_state_dict")
def test_state_is_consolidated_and_loaded(rank: int, size: int) -> None:
    """The last rank gathers everybody's state, as large as one process has it; each rank takes its share of it back."""
    model, reference = network(), network()
    optimizer, whole = zero(model.parameters(), ADAMW), plain(reference.parameters(), ADAMW)
    train(DistributedDataParallel(model), 3, size, rank, optimizer)
    train(reference, 3, size, optimizer=whole)
    optimizer.consolidate_state_dict(to=size - 1)
    holder = [optimizer.state_dict() if rank == size - 1 else None]
    wrong: list[Any] = []
    if rank == size - 1:
        for index, expected in whole.state_dict()["state"].items():
            mine = holder[0]["state"][index]
            wrong += [(index, key) for key, value in expected.items() if not torch.allclose(mine[key], value, atol=1e-9)]
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    dist.broadcast_object_list(holder, src=size - 1)
    resumed = copy.deepcopy(model)
    again = zero(resumed.parameters(), (torch.optim.AdamW, {"lr": 1.0}))
    again.load_state_dict(holder[0])
    train(DistributedDataParallel(resumed), 2, size, rank, again, first=3)
    train(reference, 2, size, optimizer=whole, first=3)
    agree(same_bits(resumed) and not wrong and close(resumed, reference, 1e-9), (wrong, apart(resumed, reference, 1e-9)))


@feature("ZeroRedundancyOptimizer")
def test_on_a_part_of_the_ranks(rank: int, size: int) -> None:
    """Even and odd ranks by themselves: owners are group ranks, broadcasts name global ones (trap 9)."""
    groups = [dist.new_group(list(range(odd, size, 2))) for odd in range(min(size, 2))]
    odd, place, members = rank % 2, rank // 2, len(range(rank % 2, size, 2))
    model, reference = network(), network()
    optimizer = zero(model.parameters(), SGD, process_group=groups[odd])
    train(DistributedDataParallel(model, process_group=groups[odd]), 3, members, place, optimizer, first=10 * odd)
    train(reference, 3, members, optimizer=plain(reference.parameters(), SGD), first=10 * odd)
    dist.destroy_process_group(groups[odd])
    agree(close(model, reference, 1e-9), apart(model, reference, 1e-9))


def overlapped(name: str) -> Callable[..., Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    return getattr(ddp_zero_hook, name)  # type: ignore[no-any-return]


@feature("ZeroRedundancyOptimizer overlapped with DDP (hook_with_zero_step, interleaved), which Gloo refuses")
@pytest.mark.parametrize("maker", [SGD, ADAMW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("shard_buckets", [False, True], ids=["whole-buckets", "shard_buckets"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static_graph"])
@pytest.mark.parametrize("name", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_overlapped_with_ddp(name: str, static: bool, shard_buckets: bool, maker: Maker, rank: int, size: int) -> None:
    """Broadcasts from the callbacks of all-reduces. The first two passes (three if static) only look at the buckets."""
    idle = 3 if static else 2
    model, reference = network(), network()
    parallel = DistributedDataParallel(model, static_graph=static, bucket_cap_mb=SMALL)
    optimizer = zero(parallel.parameters(), maker, overlap_with_ddp=True)
    hook = overlapped(name)(default_hooks.allreduce_hook, parallel, optimizer, shard_buckets=shard_buckets)
    parallel.register_comm_hook(None, hook)
    for step in range(idle + 4):
        x, y = batch(step, size)
        model.zero_grad()
        loss_of(parallel(share(x, rank)), share(y, rank)).backward()
    train(reference, 4, size, optimizer=plain(reference.parameters(), maker), first=idle)
    agree(same_bits(model) and close(model, reference, 1e-9), apart(model, reference, 1e-9))


@feature("ZeroRedundancyOptimizer")
def test_parameters_that_cannot_be_shared_evenly(rank: int, size: int) -> None:
    """One large parameter and two small: with four ranks one owns nothing, and broadcasts nothing."""

    class Lopsided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(13)
            self.big, self.small = nn.Linear(replicas.WIDE, replicas.NARROW), nn.Parameter(torch.zeros(()))
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.big(x) + self.small  # type: ignore[no-any-return]

    model, reference = Lopsided(), Lopsided()
    train(DistributedDataParallel(model), 3, size, rank, zero(model.parameters(), SGD))
    train(reference, 3, size, optimizer=plain(reference.parameters(), SGD))
    agree(same_bits(model) and close(model, reference, 1e-9), apart(model, reference, 1e-9))
