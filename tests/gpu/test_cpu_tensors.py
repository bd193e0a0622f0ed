"""CPU tensors in a world whose ranks have GPUs take the way, and the number of MPI calls, that they take in one without."""

from collections.abc import Callable
from itertools import count

import pytest
import torch

from mpicoll._engine.communicator import Communicator
from mpicoll._engine.registry import registry
from tests.gpu.fake_gpu import Gpu
from tests.gpu.ways import gpu, group_that_goes
from tests.support import agree
from tests.support.mpi_calls import recorded

pytestmark = pytest.mark.usefixtures("world")
_numbers = count()


def everything(group: Communicator, n: int) -> None:
    """One of each operation, n elements."""
    size, rank = group.size, group.rank
    x, several = torch.ones(n), torch.ones(n * size)
    group.all_reduce(x)
    group.all_reduce(torch.ones(n, dtype=torch.bfloat16))
    group.reduce(x, 0)
    group.broadcast(x, 0)
    group.all_gather_single(several, x)
    group.all_gather(list(torch.ones(size, n).unbind()), x)
    group.reduce_scatter_single(x, several)
    group.all_to_all_single(several, torch.ones(n * size))
    group.gather(x, list(torch.ones(size, n).unbind()) if rank == 0 else None, 0)
    group.scatter(x, list(torch.ones(size, n).unbind()) if rank == 0 else None, 0)
    sent = group.isend(x, (rank + 1) % size)
    group.recv(torch.ones(n), (rank - 1) % size)
    sent.wait()
    group.barrier()


def calls(make: Callable[[], Communicator], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    group = make()
    with monkeypatch.context() as patch:
        record = recorded(group, patch)
        for n in (2, 5000, 1 << 18):
            everything(group, n)
    group.close()
    return record


@pytest.mark.parametrize("way", ["staged", "ipc", "direct"])
def test_the_same_calls_with_and_without_gpus(way: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    without = calls(lambda: registry.create(f"no gpus {next(_numbers)}", None, 30), monkeypatch)
    beside = calls(lambda: group_that_goes(way, monkeypatch), monkeypatch)
    used = [name for name in ("fetch", "push", "share", "opened", "marks") if gpu.counts[name]]
    agree(without == beside and not used, (without, beside, used))
