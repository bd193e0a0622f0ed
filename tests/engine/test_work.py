"""The handle of an operation under way: it completes by itself, once, for as many threads and callbacks as ask."""

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

import mpicoll as dist
from tests.support import agree, eventually
from tests.support.doors import Call, collectives, doors

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")]

PATIENCE_S = 20.0  # seconds until a test gives up on something that should take microseconds; cores may be few


def total(size: int) -> float:
    """The sum over all ranks of rank + 1."""
    return size * (size + 1) / 2


def started(rank: int, size: int, n: int = 8) -> tuple[Tensor, Any]:
    tensor = torch.full((n,), rank + 1.0)
    return tensor, dist.all_reduce(tensor, async_op=True)


def operations(door: Any, rank: int, size: int) -> dict[str, Call]:
    """Operations that return a Work: the collectives, one of packed halves, and a receive."""
    halves, received = torch.full((4, 6), rank + 1.0, dtype=torch.bfloat16)[:, ::2], torch.zeros(5)

    def receive(async_op: bool) -> Any:
        work = door.irecv(received, (rank - 1) % size)
        door.isend(torch.full((5,), float(rank)), (rank + 1) % size)
        return work

    calls = {name: call for name, call in collectives(door, rank, size, root=size - 1).items() if "coalesced" not in name}
    calls["halves"] = Call(
        lambda async_op: door.all_reduce(halves, async_op=async_op), [halves], [torch.full_like(halves, total(size))]
    )
    calls["irecv"] = Call(receive, [received], [torch.full((5,), float((rank - 1) % size))])
    return calls


@doors
def test_completes_without_anybody_calling_wait(door: Any, rank: int, size: int) -> None:
    """Its tensors have the result, and polling ends (traps 43, 69)."""
    wrong = []
    for name, call in operations(door, rank, size).items():
        work = call.start(async_op=True)
        arrived = eventually(lambda call=call: all(map(torch.equal, call.outputs, call.expected)))  # type: ignore[misc]
        if not (arrived and eventually(work.is_completed) and work.is_success()):
            wrong.append((name, call.outputs, work))
    agree(not wrong, wrong)


@doors
def test_what_a_work_tells(door: Any, rank: int, size: int) -> None:
    """As often as asked (trap 42). Result and Future have a list of the tensors themselves (trap 44)."""
    wrong = []
    for name, call in operations(door, rank, size).items():
        work = call.start(async_op=True)
        answers = [work.wait(), work.wait(timedelta(seconds=5)), work.synchronize(), work.is_success(), work.exception()]
        future, result = work.get_future(), work.result()
        (value,) = torch.futures.wait_all([future])  # of torch's Futures only
        right = answers == [True, True, None, True, None] and all(map(torch.equal, call.outputs, call.expected))
        right &= isinstance(value, list) and isinstance(result, list) and work.get_future() is future
        places = [[tensor.data_ptr() for tensor in tensors] for tensors in (value, result, call.outputs)]
        if not (right and places[0] == places[1] and set(places[2]) <= set(places[0])):
            wrong.append((name, answers, value, result))
    agree(not wrong, wrong)


@doors
def test_source_rank(door: Any, rank: int, size: int) -> None:
    """Of a message from anybody: the group rank (trap 43)."""
    tensor = torch.zeros(1)
    work = door.irecv(tensor)
    sent = door.isend(torch.tensor([float(rank)]), (rank + 1) % size)
    work.wait()
    sent.wait()
    agree(work._source_rank() == work.source_rank() == (rank - 1) % size == tensor.item(), f"{work._source_rank()} {tensor}")


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


@doors
@pytest.mark.parametrize("how", ["async", "sync", "wait", "barrier", "p2p"])
def test_a_callback_may_communicate(how: str, door: Any, rank: int, size: int) -> None:  # trap 45
    inner = torch.full((3,), rank + 1.0)

    def callback(_: Future[list[Tensor]]) -> Any:
        if how == "async":
            return door.all_reduce(inner, async_op=True)
        if how == "sync":
            door.all_reduce(inner)
        elif how == "wait":
            door.all_reduce(inner, async_op=True).wait()
        elif how == "barrier":
            door.barrier()
            door.all_reduce(inner)
        else:
            received = torch.zeros(3)
            work = door.irecv(received, (rank - 1) % size, tag=7)
            door.isend(inner, (rank + 1) % size, tag=7).wait()
            work.wait()
            inner.copy_(received)
        return None

    work = door.all_reduce(torch.ones(8), async_op=True)
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


@doors
def test_dropped_works_are_harmless(door: Any, rank: int, size: int) -> None:  # traps 19, 46
    """Nobody keeps a Work, nor the tensor of a send; small and large messages arrive, also in strided tensors."""
    counts = [4, 4, 300_000, 300_000] * 5
    received = [torch.zeros(count, 1 + index % 3)[:, -1] for index, count in enumerate(counts)]
    reduced = [torch.full((count,), rank + 1.0) for count in counts]
    for index, tensor in enumerate(received):
        door.irecv(tensor, (rank - 1) % size, tag=index)
    gc.collect()
    door.barrier()
    for index, count in enumerate(counts):
        door.all_reduce(reduced[index], async_op=True)
        value = torch.tensor(float(index))
        door.isend(value.expand(count) if index % 2 else value.repeat(count), (rank + 1) % size, tag=index)
        gc.collect()
        torch.empty(count).fill_(-7)  # whoever gets the memory writes something else into it
    door.barrier()
    arrived = eventually(lambda: all(torch.all(t == i) for i, t in enumerate(received)))
    agree(arrived and all(torch.all(t == total(size)) for t in reduced), f"{received} {reduced}")


def test_several_threads_wait_for_one_work(rank: int, size: int) -> None:
    answers: list[object] = []

    def wait(work: Any) -> None:
        answers.append((work.wait(), len(work.get_future().wait()), work.is_completed()))

    for name in ("all_reduce", "irecv"):
        work = operations(dist, rank, size)[name].start(async_op=True)
        threads = [threading.Thread(target=wait, args=(work,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    agree(answers == [(True, 1, True)] * 8, f"{answers}")
