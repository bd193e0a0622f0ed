"""Tensors on a GPU (traps 63, 64): what is launched before a call is seen by it, and what it brings comes after that.

No GPU is needed. A fake takes the place of cuda/streams.py: "kernels" that were launched run only when somebody waits for them,
as late as they may; a tensor whose memory is read or written too early has the wrong values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from mpicoll.api import world
from mpicoll.cuda import streams
from mpicoll.engine import message
from mpicoll.engine.communicator import Communicator
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")


class OnGpu(Tensor):
    """A tensor that says it is on a GPU. Its values are an ordinary tensor's, see `plain`."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def plain(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor)


class Gpu:
    """One stream. ``marks`` and ``fetched`` count the calls."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], object]] = []
        self.done = self.marks = self.fetched = 0
        self.captured = False

    def launch(self, kernel: Callable[[], object]) -> None:
        self.launched.append(kernel)

    def run(self, until: int) -> None:
        """All that was launched up to here."""
        while self.done < until:
            self.done += 1
            self.launched[self.done - 1]()

    def capturing(self) -> bool:
        return self.captured

    def mark(self, tensor: Tensor) -> int:
        assert not tensor.is_cpu
        self.marks += 1
        return len(self.launched)

    def fetch(self, tensor: Tensor) -> Tensor:
        assert not tensor.is_cpu
        self.fetched += 1
        self.run(len(self.launched))
        return plain(tensor).clone(memory_format=torch.contiguous_format)

    @contextmanager
    def delivery(self, tensor: Tensor, after: int) -> Iterator[None]:
        assert not tensor.is_cpu
        self.run(after)
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    for name in ("capturing", "mark", "fetch", "delivery"):
        monkeypatch.setattr(streams, name, getattr(made, name))
    return made


def numbers(rank: int, count: int, layout: str = "contiguous") -> OnGpu:
    values = torch.arange(count, dtype=torch.float32) + 100 * rank
    shaped = {"contiguous": values, "transposed": values.view(-1, 2).t().contiguous().t()}[layout]
    return shaped.as_subclass(OnGpu)


def total(size: int, count: int) -> Tensor:
    return sum(plain(numbers(r, count)) for r in range(size))  # type: ignore[return-value]


def engine() -> Communicator:
    """The world's: what is below both doors, which ask torch where a tensor is."""
    found = world.of(None)
    assert found is not None
    return found


Result = tuple[Tensor, Tensor]  # what came, what should have


def all_reduce(rank: int, size: int, layout: str) -> Result:
    x = numbers(rank, 12, layout)
    engine().all_reduce(x)
    return x, total(size, 12)


def asynchronous(rank: int, size: int, layout: str) -> Result:
    x = numbers(rank, 12, layout)
    work = engine().all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x, total(size, 12)


def coalesced(rank: int, size: int, layout: str) -> Result:
    x, y = numbers(rank, 12, layout), numbers(rank, 8, layout)
    engine().all_reduce_coalesced([x, y])
    return torch.cat([plain(x).reshape(-1), plain(y).reshape(-1)]), torch.cat([total(size, 12), total(size, 8)])


def reduce(rank: int, size: int, layout: str) -> Result:
    x = numbers(rank, 12, layout)
    engine().reduce(x, 1)
    return x, total(size, 12) if rank == 1 else plain(numbers(rank, 12))


def broadcast(rank: int, size: int, layout: str) -> Result:
    x = numbers(rank, 12, layout)
    engine().broadcast(x, 1)
    return x, plain(numbers(1, 12))


def all_gather(rank: int, size: int, layout: str) -> Result:
    outputs = [numbers(9, 12, layout) for _ in range(size)]
    engine().all_gather(outputs, numbers(rank, 12, layout))
    return torch.stack([plain(x).reshape(-1) for x in outputs]), torch.stack([plain(numbers(r, 12)) for r in range(size)])


def all_gather_uneven(rank: int, size: int, layout: str) -> Result:
    outputs = [numbers(9, 2 * r + 2, layout) for r in range(size)]
    engine().all_gather(outputs, numbers(rank, 2 * rank + 2, layout))
    return torch.cat([plain(x).reshape(-1) for x in outputs]), torch.cat([plain(numbers(r, 2 * r + 2)) for r in range(size)])


def all_gather_single(rank: int, size: int, layout: str) -> Result:
    output = numbers(9, 12 * size)
    engine().all_gather_single(output, numbers(rank, 12))
    return output, torch.cat([plain(numbers(r, 12)) for r in range(size)])


def reduce_scatter_single(rank: int, size: int, layout: str) -> Result:
    output = numbers(9, 12)
    engine().reduce_scatter_single(output, numbers(rank, 12 * size))
    return output, total(size, 12 * size).view(size, 12)[rank]


def all_to_all_single(rank: int, size: int, layout: str) -> Result:
    output = numbers(9, 12 * size, layout)
    engine().all_to_all_single(output, numbers(rank, 12 * size, layout))
    return output, torch.cat([plain(numbers(r, 12 * size)).view(size, 12)[rank] for r in range(size)])


def gather(rank: int, size: int, layout: str) -> Result:
    outputs = [numbers(9, 12, layout) for _ in range(size)]
    engine().gather(numbers(rank, 12, layout), outputs if rank == 0 else None, 0)
    expected = torch.stack([plain(numbers(r if rank == 0 else 9, 12)) for r in range(size)])
    return torch.stack([plain(x).reshape(-1) for x in outputs]), expected


def scatter(rank: int, size: int, layout: str) -> Result:
    x = numbers(9, 12, layout)
    engine().scatter(x, [numbers(r, 12, layout) for r in range(size)] if rank == 0 else None, 0)
    return x, plain(numbers(rank, 12))


def ring(rank: int, size: int, layout: str) -> Result:
    x = numbers(9, 12, layout)
    request = engine().irecv(x, (rank - 1) % size)
    engine().send(numbers(rank, 12, layout), (rank + 1) % size)
    request.wait()
    return x, plain(numbers((rank - 1) % size, 12))


def shorter(rank: int, size: int, layout: str) -> Result:
    """Messages shorter than the tensors that receive them: the rest stays as it was."""
    x = numbers(9, 12, layout)
    request = engine().irecv(x, (rank - 1) % size)
    engine().send(numbers(rank, 4), (rank + 1) % size)
    request.wait()
    return x, torch.cat([plain(numbers((rank - 1) % size, 4)), plain(numbers(9, 12))[4:]])


OPERATIONS = [
    all_reduce, asynchronous, coalesced, reduce, broadcast, all_gather, all_gather_uneven, all_gather_single,
    reduce_scatter_single, all_to_all_single, gather, scatter, ring, shorter,
]  # fmt: skip


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_every_operation(operation: Callable[[int, int, str], Result], layout: str, gpu: Gpu, rank: int, size: int) -> None:
    came, expected = operation(rank, size, layout)
    agree(torch.equal(plain(came).reshape(-1), expected.reshape(-1)) and gpu.fetched, (came, expected))


def test_what_is_launched_before_is_sent(gpu: Gpu, rank: int, size: int) -> None:
    """A kernel that is still to run when all_reduce is called: it must have run before a byte is read."""
    x = numbers(rank, 12)
    gpu.launch(lambda: plain(x).fill_(rank + 1.0))
    work = engine().all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    agree(plain(x).eq(size * (size + 1) / 2).all(), x)


@pytest.mark.min_ranks(2)
def test_what_is_launched_before_reads_the_old_values(gpu: Gpu, rank: int, size: int) -> None:
    """A kernel that reads the tensor which a message is for, and has not run when the receive is started."""
    seen: list[Tensor] = []
    x = numbers(9, 12)
    gpu.launch(lambda: seen.append(plain(x).clone()))
    request = engine().irecv(x, (rank - 1) % size)
    engine().send(numbers(rank, 12), (rank + 1) % size)
    request.wait()
    agree(len(seen) == 1 and torch.equal(seen[0], plain(numbers(9, 12))) and x[0] == 100 * ((rank - 1) % size), seen)


def test_each_delivery_has_a_mark_from_before_the_operation(gpu: Gpu, rank: int) -> None:
    x = numbers(rank, 12)
    incoming = message.incoming("recv", x)
    marks = gpu.marks
    gpu.launch(lambda: None)
    incoming.deliver(torch.zeros(12))
    agree(marks == 1 and gpu.marks == 1 and incoming.after == 0 and gpu.done == 0)


@pytest.mark.parametrize(
    "call", [lambda x: engine().all_reduce(x), lambda x: engine().isend(x, 0), lambda x: engine().broadcast(x, 0)]
)
def test_capture_into_a_graph_is_refused(call: Callable[[Any], object], gpu: Gpu, rank: int) -> None:
    gpu.captured = True
    with pytest.raises(RuntimeError, match=r"is being captured into a CUDA graph; MPI cannot be captured"):
        call(numbers(rank, 12))
    assert gpu.fetched == 0
    gpu.captured = False
    agree(True)


def test_a_gpus_tensors_are_ours_where_the_group_says_so() -> None:
    """Both doors then take them the same way, and layouts that torch refuses are not refused."""
    mixed = torch.distributed.new_group(backend="cpu:mpi,cuda:gloo")
    ours = [world._carries(group, torch.device(kind)) for group in (None, mixed) for kind in ("cuda", "meta", "xpu")]
    torch.distributed.destroy_process_group(mixed)
    agree(ours == [True, True, False, False, True, False], ours)
