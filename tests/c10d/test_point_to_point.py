"""Messages between two ranks, and what a Work of torch's tells, through init_process_group("mpi")."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpicoll.errors import OperationTimeout
from tests.support import agree, eventually


@pytest.fixture(autouse=True)
def mpi_world(_end_of_world: None) -> None:
    if not dist.is_initialized():
        dist.init_process_group("mpi")


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 100 * rank


@pytest.mark.min_ranks(2)
def test_send_blocks_until_the_tensor_is_free(rank: int, size: int) -> None:
    mine = of_rank(rank, 1000)
    if rank == 0:
        answer = dist.send(mine, 1)
        mine.zero_()
        agree(answer is None)
    else:
        sender = dist.recv(mine, 0) if rank == 1 else 0
        agree(sender == 0 and torch.equal(mine, of_rank(0 if rank == 1 else rank, 1000)), mine)


@pytest.mark.min_ranks(2)
def test_irecv_any_source_tells_the_group_rank(rank: int, size: int) -> None:
    """trap 43: through torch's C++ too, the Work knows its source and its result."""
    tensor = torch.full((3,), -1.0)
    if rank == 0:
        work = dist.irecv(tensor, None)
        done = eventually(work.is_completed)
        with _ignored():
            told = (work._source_rank(), work.source_rank(), work.result()[0] is tensor or work.result()[0].data_ptr())
        agree(done and told == (1, 1, True) and torch.equal(tensor, of_rank(1, 3)), told)
    else:
        if rank == 1:
            dist.isend(of_rank(1, 3), 0).wait()
        agree(True)


def test_work_of_a_collective(rank: int, size: int) -> None:
    """traps 42-44: polling ends; result and Future hold the list of tensors; wait may be called again."""
    tensor = of_rank(rank, 3)
    work = dist.all_reduce(tensor, async_op=True)
    polled = eventually(work.is_completed)
    expected = sum(of_rank(r, 3) for r in range(size))
    future = work.get_future()
    with _ignored():
        told = [work.is_success(), work.exception() is None, work.wait(), work.wait(timedelta(seconds=5))]
        result = work.result()
    value = future.value()
    agree(
        polled
        and all(told)
        and isinstance(value, list)
        and torch.equal(value[0], expected)
        and torch.equal(result[0], expected)
        and torch.equal(tensor, expected),
        (told, value, result),
    )


def test_a_callback_may_start_a_collective(rank: int, size: int) -> None:
    """trap 45."""
    tensor, second = of_rank(rank, 3), torch.ones(2)
    inner: list[dist.Work] = []

    def then(future: torch.futures.Future) -> Tensor:
        inner.append(dist.all_reduce(second, async_op=True))
        return future.value()[0] / size

    mean = dist.all_reduce(tensor, async_op=True).get_future().then(then).wait()
    started = eventually(lambda: inner)
    inner[0].wait()
    agree(started and torch.equal(second, torch.full((2,), float(size))) and torch.equal(mean, tensor / size), mean)


@pytest.mark.min_ranks(2)
def test_wait_that_expires(rank: int, size: int) -> None:
    """trap 42: raises, names operation, group and rank, and the group refuses further use."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    text = ""
    if rank == 0:
        work = dist.barrier(group=group, async_op=True)
        with pytest.raises(OperationTimeout) as caught:
            work.wait(timedelta(seconds=0.2))
        text = str(caught.value)
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)
        with _ignored():
            assert isinstance(work.exception(), OperationTimeout)
            assert not work.is_success()
    agree(rank != 0 or ("barrier" in text and "rank 0" in text), text)
    if rank != 0:
        dist.barrier(group=group)
    agree(True)
    dist.destroy_process_group(group)


def test_timeout_of_new_group_reaches_the_engine(rank: int) -> None:
    """trap 59."""
    from mpicoll._engine.registry import registry

    group = dist.new_group(timeout=timedelta(seconds=77))
    seconds = registry.find(group.group_name).timeout_s  # type: ignore[union-attr]
    group.set_timeout(timedelta(seconds=78))
    changed = registry.find(group.group_name).timeout_s  # type: ignore[union-attr]
    dist.destroy_process_group(group)
    agree((seconds, changed) == (77, 78), (seconds, changed))


@contextlib.contextmanager
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
