"""Uneven inputs: ranks that are through shadow the collectives of the others, for DDP and whatever else can join."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel

from tests.stack import replicas
from tests.stack.replicas import apart, batch, close, loss_of, network, same_bits, share
from tests.support import agree

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:Detected uneven inputs")

feature = pytest.mark.feature


def batches_of(rank: int) -> int:
    """The last rank has most."""
    return 2 + rank


def shadowed(size: int, divide_by_world: bool) -> nn.Module:
    """One process that does what the ranks do together: in step s those with a batch left add up their gradients."""
    model = network()
    optimizer = replicas.sgd(model.parameters())
    for step in range(batches_of(size - 1)):
        active = [r for r in range(size) if step < batches_of(r)]
        x, y = batch(step, size)
        optimizer.zero_grad()
        for r in active:
            (loss_of(model(share(x, r)), share(y, r)) / (size if divide_by_world else len(active))).backward()
        optimizer.step()
    return model


@feature("DDP: join with uneven inputs")
@pytest.mark.parametrize("divide_by_world", [True, False], ids=["divide-by-world", "divide-by-active"])
@pytest.mark.parametrize("bucket_mb", [25, 100 / 2**20], ids=["one-bucket", "buckets"])
def test_model_join(bucket_mb: float, divide_by_world: bool, rank: int, size: int) -> None:
    """model.join(): the last step is the last rank's alone, and the weights that it ends with are everybody's."""
    model, reference = network(), shadowed(size, divide_by_world)
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    optimizer = replicas.sgd(model.parameters())
    with parallel.join(divide_by_initial_world_size=divide_by_world):
        replicas.train(parallel, batches_of(rank), size, rank, optimizer)
    agree(same_bits(model) and close(model, reference), apart(model, reference))


@feature("DDP: join with uneven inputs")
def test_join_with_buffers_and_unused_parameters(rank: int, size: int) -> None:
    """Those that are through also shadow the broadcast of the buffers and the search for unused parameters."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.BatchNorm1d(replicas.WIDE), network())
            self.never = nn.Linear(2, 2)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    model = Normed()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    with parallel.join():
        replicas.train(parallel, batches_of(rank), size, rank)
    norm = model.net[0]
    assert isinstance(norm, nn.BatchNorm1d)
    steps = torch.tensor(batches_of(size - 1))
    agree(same_bits(model) and torch.equal(norm.num_batches_tracked, steps), norm.num_batches_tracked)  # type: ignore[arg-type]


@feature("DDP: join with uneven inputs")
@pytest.mark.min_ranks(2)
def test_early_termination_is_an_error_everywhere(rank: int, size: int) -> None:
    """throw_on_early_termination: the first rank that runs out ends the loop on all."""
    parallel = DistributedDataParallel(network())
    steps, said = 0, ""
    try:
        with parallel.join(throw_on_early_termination=True):
            for step in range(batches_of(rank)):
                x, y = batch(step, size)
                loss_of(parallel(share(x, rank)), share(y, rank)).backward()
                steps += 1
    except RuntimeError as error:
        said = str(error)
    dist.all_reduce(total := torch.ones(1))
    agree("exhausted" in said and steps == batches_of(0) and total.item() == size, (said, steps))


@feature("DDP: join with uneven inputs")
def test_join_under_no_sync(rank: int, size: int) -> None:
    """Gradients are accumulated over two batches; those that are through must notice that there is nothing to reduce."""
    model = network()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel.join():
        for pair in range(1 + rank):
            optimizer.zero_grad()
            for micro in range(2):
                x, y = batch(2 * pair + micro, size)
                if micro == 0:
                    with parallel.no_sync():
                        loss_of(parallel(share(x, rank)), share(y, rank)).backward()
                else:
                    loss_of(parallel(share(x, rank)), share(y, rank)).backward()
            optimizer.step()
    reference = network()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for pair in range(size):
        plain.zero_grad()
        for r in range(pair, size):
            for micro in range(2):
                x, y = batch(2 * pair + micro, size)
                (loss_of(reference(share(x, r)), share(y, r)) / size).backward()
        plain.step()
    agree(same_bits(model) and close(model, reference), apart(model, reference))


class Counter(Joinable):
    """Counts the batches of all ranks; nearly as in torch's documentation."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.count, self.told = torch.zeros(1), torch.zeros(1)

    def __call__(self) -> None:
        Join.notify_join_context(self)
        one = torch.ones(1)
        dist.all_reduce(one, group=self.group)
        self.count += one

    def join_hook(self, **kwargs: Any) -> JoinHook:
        counter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                dist.all_reduce(torch.zeros(1), group=counter.group)

            def post_hook(self, is_last_joiner: bool) -> None:
                last = torch.tensor([dist.get_rank() if is_last_joiner else -1])
                dist.all_reduce(last, dist.ReduceOp.MAX, group=counter.group)
                counter.told = counter.count.clone()
                dist.broadcast(counter.told, int(last), group=counter.group)

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


@feature("Join of DDP, ZeroRedundancyOptimizer and one's own Joinable")
def test_join_of_several(rank: int, size: int) -> None:
    """As Gloo does it, within rounding: a rank that is through goes on to step and to hand out its share of the
    parameters, with the gradients of its last batch, since DDP gives it no others.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    trained: list[nn.Module] = []
    told: list[Tensor] = []
    for group in (dist.group.WORLD, gloo := dist.new_group(backend="gloo")):
        model, counter = network(), Counter(group)
        parallel = DistributedDataParallel(model, process_group=group)
        optimizer = ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
        with Join([counter, parallel, optimizer]):
            for step in range(batches_of(rank)):
                counter()
                x, y = batch(step, size)
                optimizer.zero_grad(set_to_none=False)
                loss_of(parallel(share(x, rank)), share(y, rank)).backward()
                optimizer.step()
        trained.append(model)
        told.append(counter.told)
    dist.destroy_process_group(gloo)
    counted = told[0].item() == told[1].item() == sum(batches_of(r) for r in range(size))
    model, reference = trained
    agree(same_bits(model) and counted and close(model, reference, 1e-9), (told, apart(model, reference, 1e-9)))
