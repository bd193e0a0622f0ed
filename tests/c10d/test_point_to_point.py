"""Messages between two ranks, and what a Work of torch's tells, through init_process_group("mpi")."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpicoll.errors import OperationTimeout
from tests.support import agree, eventually, needs_sort_ranks


@pytest.fixture(autouse=True)
def mpi_world(_end_of_world: None) -> None:
    if not dist.is_initialized():
        dist.init_process_group("mpi")


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 100 * rank


@pytest.mark.min_ranks(2)
def test_send_and_recv_round_the_ring(rank: int, size: int) -> None:
    """traps 2 and 15: recv tells the sender; tags match out of order."""
    right, left = (rank + 1) % size, (rank - 1) % size
    a, b = torch.empty(3), torch.empty(2, 2)
    works = [dist.isend(of_rank(rank, 3), right, tag=1), dist.isend(of_rank(rank, 2, 2), right, tag=2)]
    senders = [dist.recv(b, left, tag=2), dist.recv(a, left, tag=1)]
    for work in works:
        work.wait()
    agree(senders == [left, left] and torch.equal(a, of_rank(left, 3)) and torch.equal(b, of_rank(left, 2, 2)), (a, b))


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


@needs_sort_ranks
@pytest.mark.min_ranks(2)
def test_any_source(rank: int, size: int) -> None:
    """trap 12: the global rank of the sender, also in a group that numbers differently."""
    backwards = dist.new_group(list(reversed(range(size))), sort_ranks=False)
    last = size - 1  # group rank 0
    if rank != last:
        dist.isend(of_rank(rank, 2), last, group=backwards).wait()
        agree(True)
    else:
        got = []
        for _ in range(size - 1):
            tensor = torch.empty(2)
            sender = dist.recv(tensor, group=backwards)
            got.append((sender, torch.equal(tensor, of_rank(sender, 2))))
        agree(sorted(got) == [(r, True) for r in range(size - 1)], got)
    dist.destroy_process_group(backwards)


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


def test_a_message_to_oneself(rank: int) -> None:
    """trap 13."""
    tensor = torch.empty(3)
    work = dist.irecv(tensor, rank)
    dist.isend(of_rank(rank, 3), rank).wait()
    work.wait()
    with pytest.raises(ValueError, match="rank"):
        dist.send(tensor, rank)
    agree(torch.equal(tensor, of_rank(rank, 3)), tensor)


def test_batch_isend_irecv(rank: int, size: int) -> None:
    """trap 21: receives first, and nobody waits for anybody."""
    right, left = (rank + 1) % size, (rank - 1) % size
    a, b = torch.empty(4), torch.empty(4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, a, left, tag=5),
            dist.P2POp(dist.isend, of_rank(rank, 4), right, tag=5),
            dist.P2POp(dist.irecv, b, right, tag=6),
            dist.P2POp(dist.isend, of_rank(rank, 4) + 1, left, tag=6),
        ]
    )
    for work in works:
        work.wait()
    agree(len(works) == 4 and torch.equal(a, of_rank(left, 4)) and torch.equal(b, of_rank(right, 4) + 1), (a, b))


def test_objects(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    got: list[object] = [None, None]
    if size == 1:
        agree(True)
        return
    if rank % 2 == 0:
        dist.send_object_list([rank, "text"], right)
        dist.recv_object_list(got, left)
    else:
        dist.recv_object_list(got, left)
        dist.send_object_list([rank, "text"], right)
    agree(got == [left, "text"], got)


def test_complex_messages(rank: int, size: int) -> None:
    tensor = torch.empty(3, dtype=torch.complex64)
    work = dist.irecv(tensor, (rank - 1) % size)
    dist.isend(torch.complex(of_rank(rank, 3), of_rank(rank, 3)), (rank + 1) % size).wait()
    work.wait()
    left = of_rank((rank - 1) % size, 3)
    agree(torch.equal(tensor, torch.complex(left, left)), tensor)


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


def test_dropped_works_are_harmless(rank: int, size: int) -> None:
    """traps 19 and 46: neither tensor nor Work is held by the caller; the collector runs in between."""
    received = torch.empty(50_000)
    dist.irecv(received, (rank - 1) % size)
    dist.isend(of_rank(rank, 50_000), (rank + 1) % size)
    kept = of_rank(rank, 1000)
    dist.all_reduce(kept, async_op=True)
    dist.all_reduce(of_rank(rank, 1000), async_op=True)
    gc.collect()
    dist.barrier()
    arrived = eventually(lambda: torch.equal(received, of_rank((rank - 1) % size, 50_000)))
    agree(arrived and torch.equal(kept, sum(of_rank(r, 1000) for r in range(size))))


def test_opposite_orders_on_two_groups(rank: int, size: int) -> None:
    """trap 72."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [of_rank(rank, 1000), of_rank(rank, 1000) * 2]
    order = (0, 1) if rank % 2 == 0 else (1, 0)
    works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
    for i in reversed(order):
        works[i].wait()
    total = sum(of_rank(r, 1000) for r in range(size))
    for group in groups:
        dist.destroy_process_group(group)
    agree(torch.equal(tensors[0], total) and torch.equal(tensors[1], 2 * total))


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


def test_dataloader_workers_fork_and_do_not_communicate(rank: int, size: int) -> None:
    """trap 57: forked workers compute; one that communicates gets an error, not a hang."""
    from torch.utils.data import DataLoader

    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context="fork")
    rows = torch.cat(list(loader))
    total = rows.float().sum()
    dist.all_reduce(total)
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    agree(status == 0 and rows.tolist() == [i * i for i in range(12)] and total == 506 * size, (status, rows, total))


class Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index * index


@contextlib.contextmanager
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
