"""DistributedDataParallel over init_process_group("mpi") equals one process on the whole batch, bit for bit between ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpicoll._c10d.operations import Operations
from mpicoll._progress.work import Work
from tests.support import agree, everyone

ROWS = 4  # per rank

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's optimizers call torch.jit
]


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    rows = ROWS * size
    return (
        torch.randn(rows, 6, generator=generator, dtype=torch.float64),
        torch.randn(rows, 3, generator=generator, dtype=torch.float64),
    )


def share(tensor: Tensor, rank: int) -> Tensor:
    return tensor[rank * ROWS : (rank + 1) * ROWS]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def close(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> bool:
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=0, atol=tolerance) for p, q in pairs)


def same_bits(model: nn.Module) -> bool:
    """trap 32: replicas that differ in one bit drift apart."""
    mine = [p.detach().numpy().tobytes() for p in model.parameters()]
    return all(other == mine for other in everyone(mine))


def train(forward: Callable[[nn.Module, Tensor], Tensor], model: nn.Module, steps: int, rank: int | None, size: int) -> None:
    """SGD on the whole batch (rank None) or on this rank's share of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, size)
        if rank is not None:
            x, y = share(x, rank), share(y, rank)
        optimizer.zero_grad()
        loss_of(forward(model, x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("bucket_mb", [25, 0.0001], ids=["one-bucket", "many-buckets"])
def test_equals_one_process_on_the_whole_batch(bucket_mb: float, rank: int, size: int) -> None:
    reference, model = network(), network()
    train(lambda m, x: m(x), reference, 5, None, size)
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    train(lambda m, x: m(x), parallel, 5, rank, size)
    agree(same_bits(model) and close(model, reference), list(model.parameters()))


def test_ranks_start_from_rank_0s_weights(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(3, 3))
    agree(same_bits(model))


def test_different_models_are_refused(rank: int, size: int) -> None:
    """trap 62: DDP begins with a C++ allgather of the parameters' shapes; who differs from rank 0 raises."""
    parameters = [torch.ones(3, 3 + (rank > 0))]
    refused = False
    try:
        dist._verify_params_across_processes(dist.group.WORLD, parameters, None)
    except RuntimeError as error:
        refused = "sizes" in str(error)
    agree(refused == (rank > 0), refused)


def test_an_all_reduce_that_fails_in_a_backward_pass(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The reducer reads the Future in C++, takes the first tensor of its value, and crashed because an error has none."""
    parallel = DistributedDataParallel(network())
    loss = parallel(torch.ones(2, 6, dtype=torch.float64)).sum()

    def fails(self: Operations, tensors: object, opts: object = None) -> Work:
        work = Work("all_reduce", [], timeout_s=1)
        work._complete(ValueError("own words"))
        return work

    monkeypatch.setattr(Operations, "allreduce", fails)
    error = ""
    try:
        loss.backward()
    except RuntimeError as caught:
        error = str(caught)
    agree("own words" in error, error)
