"""The handle of an operation under way: it completes by itself, once, for as many threads and callbacks as ask."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

import mpicoll as dist
from tests.support import agree, eventually

pytestmark = pytest.mark.usefixtures("world")

PATIENCE_S = 20.0  # seconds until a test gives up on something that should take microseconds; cores may be few


def total(size: int) -> float:
    """The sum over all ranks of rank + 1."""
    return size * (size + 1) / 2


def started(rank: int, size: int, n: int = 8) -> tuple[Tensor, Any]:
    tensor = torch.full((n,), rank + 1.0)
    return tensor, dist.all_reduce(tensor, async_op=True)


OPERATIONS: dict[str, Callable[[int, int], tuple[Any, Tensor, Tensor]]] = {}


def operation(function: Callable[[int, int], tuple[Any, Tensor, Tensor]]) -> None:
    OPERATIONS[function.__name__] = function


@operation
def all_reduce(rank: int, size: int) -> tuple[Any, Tensor, Tensor]:
    tensor = torch.full((5,), rank + 1.0)
    return dist.all_reduce(tensor, async_op=True), tensor, torch.full((5,), total(size))


@operation
def all_reduce_strided_bf16(rank: int, size: int) -> tuple[Any, Tensor, Tensor]:
    tensor = torch.full((4, 6), rank + 1.0, dtype=torch.bfloat16)[:, ::2]
    return dist.all_reduce(tensor, async_op=True), tensor, torch.full((4, 3), total(size), dtype=torch.bfloat16)


@operation
def broadcast(rank: int, size: int) -> tuple[Any, Tensor, Tensor]:
    tensor = torch.full((5,), float(rank))
    return dist.broadcast(tensor, src=size - 1, async_op=True), tensor, torch.full((5,), size - 1.0)


@operation
def all_gather_single(rank: int, size: int) -> tuple[Any, Tensor, Tensor]:
    output = torch.zeros(size * 2)
    work = dist.all_gather_into_tensor(output, torch.full((2,), float(rank)), async_op=True)
    return work, output, torch.arange(float(size)).repeat_interleave(2)


@operation
def reduce_scatter_single(rank: int, size: int) -> tuple[Any, Tensor, Tensor]:
    output = torch.zeros(2)
    work = dist.reduce_scatter_tensor(output, torch.full((2 * size,), rank + 1.0), async_op=True)
    return work, output, torch.full((2,), total(size))


@operation
def all_to_all_single(rank: int, size: int) -> tuple[Any, Tensor, Tensor]:
    output = torch.zeros(size)
    work = dist.all_to_all_single(output, torch.full((size,), float(rank)), async_op=True)
    return work, output, torch.arange(float(size))


@operation
def irecv(rank: int, size: int) -> tuple[Any, Tensor, Tensor]:
    tensor = torch.zeros(5)
    work = dist.irecv(tensor, src=(rank - 1) % size)
    dist.isend(torch.full((5,), float(rank)), dst=(rank + 1) % size)
    return work, tensor, torch.full((5,), float((rank - 1) % size))


@pytest.mark.parametrize("name", OPERATIONS)
def test_completes_without_anybody_calling_wait(name: str, rank: int, size: int) -> None:  # trap 69
    work, tensor, expected = OPERATIONS[name](rank, size)
    arrived = eventually(lambda: torch.equal(tensor, expected))
    agree(arrived, f"{tensor}")
    agree(eventually(lambda: work._done) and work.is_completed() and work.is_success(), f"{work}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_polling_ends(name: str, rank: int, size: int) -> None:  # trap 43
    work, tensor, expected = OPERATIONS[name](rank, size)
    deadline = time.monotonic() + PATIENCE_S
    while not work.is_completed() and time.monotonic() < deadline:
        pass
    agree(torch.equal(tensor, expected) and work.is_completed(), f"{tensor}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_wait_returns_true_as_often_as_asked(name: str, rank: int, size: int) -> None:  # trap 42
    work, tensor, expected = OPERATIONS[name](rank, size)
    answers = [work.wait(), work.wait(), work.synchronize(), work.is_success(), work.exception()]
    agree(answers == [True, True, None, True, None] and torch.equal(tensor, expected), f"{answers} {tensor}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_result_and_future_are_lists_of_the_tensors_themselves(name: str, rank: int, size: int) -> None:  # trap 44
    work, tensor, expected = OPERATIONS[name](rank, size)
    value = work.get_future().wait()
    result = work.result()
    agree(
        isinstance(value, list) and isinstance(result, list) and torch.equal(value[0], expected)
        and any(t.data_ptr() == tensor.data_ptr() for t in value) and value[0].data_ptr() == result[0].data_ptr(),
        f"{value} {result}",
    )  # fmt: skip


def test_work_is_torchs_work_and_future_is_torchs_future(rank: int, size: int) -> None:
    _, work = started(rank, size)
    future = work.get_future()
    agree(isinstance(work, dist.Work) and isinstance(future, Future) and work.get_future() is future)
    work.wait()
    agree(torch.futures.wait_all([future])[0][0][0] == total(size))


def test_source_rank(rank: int, size: int) -> None:
    tensor = torch.zeros(1)
    work = dist.irecv(tensor)  # from anybody
    sent = dist.isend(torch.tensor([float(rank)]), (rank + 1) % size)
    work.wait()
    sent.wait()
    agree(work._source_rank() == (rank - 1) % size == tensor.item(), f"{work._source_rank()} {tensor}")


def test_the_future_is_complete_only_when_the_result_is_delivered(rank: int, size: int) -> None:  # traps 18, 44
    seen: list[Tensor] = []
    tensor = torch.full((3, 4), rank + 1.0, dtype=torch.float16).t()  # packed, summed in float32, divided, copied back
    work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
    done = work.get_future().then(lambda future: seen.append(future.value()[0].clone()))
    done.wait()
    agree(torch.equal(seen[0], torch.full((4, 3), total(size) / size, dtype=torch.float16)), f"{seen}")


def test_callbacks_before_and_after_completion(rank: int, size: int) -> None:
    _, work = started(rank, size)
    early = work.get_future().then(lambda future: future.value()[0].sum().item())
    work.wait()
    late = work.get_future().then(lambda future: future.value()[0].sum().item())
    agree([early.wait(), late.wait()] == [8 * total(size)] * 2)


def test_a_chain_of_collectives(rank: int, size: int) -> None:  # trap 45
    """all_reduce, then another one started by the callback, then another: what gradient compression hooks do."""

    def again(future: Future[list[Tensor]]) -> Tensor:
        tensor = future.value()[0] / size
        dist.all_reduce(tensor, async_op=True).get_future().wait()
        return tensor

    tensor = torch.full((8,), rank + 1.0)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    outer = future.then(again).then(lambda inner: again_of(inner.value(), size))
    agree(torch.equal(outer.wait(), torch.full((8,), total(size))), f"{outer.value()}")


def again_of(tensor: Tensor, size: int) -> Tensor:
    copy = tensor / size
    dist.all_reduce(copy, async_op=True).wait()
    return copy


@pytest.mark.parametrize("how", ["async", "sync", "wait", "barrier", "p2p"])
def test_a_callback_may_communicate(how: str, rank: int, size: int) -> None:  # trap 45
    inner = torch.full((3,), rank + 1.0)

    def callback(_: Future[list[Tensor]]) -> Any:
        if how == "async":
            return dist.all_reduce(inner, async_op=True)
        if how == "sync":
            dist.all_reduce(inner)
        elif how == "wait":
            dist.all_reduce(inner, async_op=True).wait()
        elif how == "barrier":
            dist.barrier()
            dist.all_reduce(inner)
        else:
            received = torch.zeros(3)
            work = dist.irecv(received, (rank - 1) % size, tag=7)
            dist.isend(inner, (rank + 1) % size, tag=7).wait()
            work.wait()
            inner.copy_(received)
        return None

    _, work = started(rank, size)
    answer = work.get_future().then(callback).wait()
    if answer is not None:
        answer.wait()
    expected = (rank - 1) % size + 1.0 if how == "p2p" else total(size)
    agree(torch.equal(inner, torch.full((3,), expected)), f"{inner}")


def test_a_callback_of_a_receive_may_communicate(rank: int, size: int) -> None:
    tensor, inner = torch.zeros(2), torch.full((3,), rank + 1.0)
    work = dist.irecv(tensor, (rank - 1) % size)
    sent = dist.isend(torch.ones(2), (rank + 1) % size)
    work.get_future().then(lambda _: dist.all_reduce(inner)).wait()
    sent.wait()
    agree(torch.equal(inner, torch.full((3,), total(size))), f"{inner}")


def test_what_a_callback_starts_comes_first_on_every_rank(rank: int, size: int) -> None:  # traps 45, 71
    """Many buckets in flight, each with a callback that starts more of them: every rank must keep one order.

    The sizes differ, so that ranks out of step would see truncated messages or wrong sums.
    """
    buckets, outers = [], []
    for index in range(30):
        if index % size == rank:
            time.sleep(0.002)  # so that some ranks have the bucket before behind them, and others have not
        bucket = torch.full((index + 1,), rank + 1.0)

        def compress(future: Future[list[Tensor]], index: int = index) -> Tensor:
            small = torch.full((100 + index,), rank + float(index))
            dist.all_reduce(small, async_op=True).wait()
            later = torch.full((200 + index,), rank + 1.0)
            dist.all_reduce(later, async_op=True)
            last = torch.full((300 + index,), rank + 2.0)
            dist.all_reduce(last)
            return torch.stack([small[0], last[0]])

        outers.append(dist.all_reduce(bucket, async_op=True).get_future().then(compress))
        buckets.append(bucket)
    dist.barrier()
    ranks = range(size)
    expected = [[float(sum(r + i for r in ranks)), float(sum(r + 2 for r in ranks))] for i in range(30)]
    got = [outer.wait().tolist() for outer in outers]
    agree(got == expected and all(torch.all(b == total(size)) for b in buckets), f"{got}")


def test_an_exception_in_a_callback_belongs_to_its_future(rank: int, size: int) -> None:
    def fails(_: Future[list[Tensor]]) -> None:
        raise KeyError("in a callback")

    tensor, work = started(rank, size)
    outer = work.get_future().then(fails)
    error = None
    try:
        outer.wait()
    except Exception as caught:  # noqa: BLE001  its kind is torch's business
        error = caught
    agree(error is not None and "in a callback" in str(error), f"{error!r}")
    work.wait()
    dist.all_reduce(tensor)  # the group and its thread go on
    next_tensor, next_work = started(rank, size)
    next_work.wait()
    agree(tensor[0] == total(size) * size and next_tensor[0] == total(size), f"{tensor} {next_tensor}")


def test_an_exception_in_a_done_callback_harms_nobody(rank: int, size: int) -> None:
    _, work = started(rank, size)
    work.get_future().add_done_callback(lambda _: 1 // 0)  # torch prints it
    work.wait()
    tensor, work = started(rank, size)
    work.wait()
    agree(tensor[0] == total(size), f"{tensor}")


@pytest.mark.parametrize("door", [dist, torch.distributed], ids=lambda door: door.__name__)
def test_dropped_works_are_harmless(door: Any, rank: int, size: int) -> None:  # traps 19, 46
    received = [torch.zeros(4) for _ in range(50)]
    reduced = [torch.full((4,), rank + 1.0) for _ in range(50)]
    for index in range(50):
        door.irecv(received[index], (rank - 1) % size, tag=index)
        door.all_reduce(reduced[index], async_op=True)
        door.isend(torch.full((4,), float(index)), (rank + 1) % size, tag=index)  # its tensor is dropped as well
        if index % 10 == 0:
            gc.collect()
    door.barrier()
    arrived = eventually(lambda: all(torch.all(t == i) for i, t in enumerate(received)))
    agree(arrived and all(torch.all(t == total(size)) for t in reduced), f"{received} {reduced}")


def test_several_threads_wait_for_one_work(rank: int, size: int) -> None:
    answers: list[object] = []

    def wait(work: Any) -> None:
        answers.append((work.wait(), len(work.get_future().wait()), work.is_completed()))

    for name in ("all_reduce", "irecv"):
        work, _, _ = OPERATIONS[name](rank, size)
        threads = [threading.Thread(target=wait, args=(work,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    agree(answers == [(True, 1, True)] * 8, f"{answers}")


def test_wait_in_another_thread_than_the_starter(rank: int, size: int) -> None:
    pairs = [started(rank, size) for _ in range(10)]
    done: list[float] = []
    thread = threading.Thread(target=lambda: done.extend(w.wait() and t[0].item() for t, w in reversed(pairs)))
    thread.start()
    thread.join(PATIENCE_S)
    agree(done == [total(size)] * 10, f"{done}")


def test_repr_says_what_it_is(rank: int, size: int) -> None:
    _, work = started(rank, size)
    work.wait()
    agree("all_reduce" in repr(work) and "completed" in repr(work) and f"rank {rank} of {size}" in repr(work), work)
