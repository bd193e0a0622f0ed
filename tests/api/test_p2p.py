"""Messages between two ranks: tags, order, any source, sizes that differ, messages to oneself, dropped handles."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll as dist
from mpicoll._api import groups
from mpicoll._host.matching import Unmatched
from mpicoll._mpi import arrivals
from tests.support import agree, needs_sort_ranks
from tests.support.tensors import of_rank, same

pytestmark = pytest.mark.usefixtures("world")
BIG = 300_000  # floats; above every MPI's limit for messages that are copied at once


def ones(value: float, count: int = 4) -> torch.Tensor:
    return torch.full((count,), float(value))


@needs_sort_ranks
@pytest.mark.min_ranks(2)
def test_any_source_in_a_group(rank: int, size: int) -> None:  # traps 9, 12
    """In a group whose order is the reverse: the return value is a global rank, the Work's source a group rank."""
    group = dist.new_group(list(range(size))[::-1], sort_ranks=False)
    if rank == 0:  # group rank size - 1
        blocking, immediate = torch.empty(4), torch.empty(4)
        assert dist.recv(blocking, group=group, tag=1) == size - 1
        work = dist.irecv(immediate, group=group, tag=2)
        work.wait()
        good = work._source_rank() == 0 and work.source_rank() == 0 and same(immediate, ones(size))
        agree(good and same(blocking, ones(size - 1)), work._source_rank())
    elif rank == size - 1:
        dist.send(ones(rank), group_dst=size - 1, group=group, tag=1)
        dist.isend(ones(size), 0, group=group, tag=2).wait()
        agree(True)
    else:
        agree(True)
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(3)
@pytest.mark.parametrize("second", ["recv", "irecv", "torch"])
def test_two_threads_receive_from_any_rank(second: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both found one message, and one of them then waited for another one of its sender, although rank 2's was there."""
    group = dist.new_group([0, 1, 2])
    if rank == 0:
        monkeypatch.setattr(arrivals, "first", slowly(arrivals.first))
        senders: list[int] = []
        time.sleep(0.1)  # both messages have come
        calls = {
            "recv": lambda: dist.recv(torch.empty(1), group=group),
            "irecv": lambda: dist.irecv(torch.empty(1), group=group).wait(),
            "torch": lambda: torch.distributed.recv(torch.empty(1), group=group),
        }
        targets = [lambda way=way: senders.append(calls[way]()) for way in ("recv", second)]
        assert all(ended([threading.Thread(target=target, daemon=True) for target in targets])), senders
    elif rank < 3:
        dist.send(ones(rank, 1), 0, group=group)
    agree(True)
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(3)
def test_a_receive_from_any_rank_beside_one_from_a_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a quick succession, MPI's own receive is called. It took the message that the other thread had found."""
    group = dist.new_group([0, 1, 2])
    if rank == 0:
        for _ in range(100):
            dist.recv(torch.empty(1), 1, group=group)
        dist.recv(torch.empty(1), group=group)
        monkeypatch.setattr(arrivals, "first", slowly(arrivals.first))
        senders: list[int] = []
        from_any = threading.Thread(target=lambda: senders.append(dist.recv(torch.empty(1), group=group)), daemon=True)
        from_one = threading.Thread(target=dist.recv, args=(torch.empty(1), 1, group), daemon=True)
        assert ended([from_any, from_one])[0]
        dist.send(torch.tensor(senders), 1, group=group)
        if senders == [1]:
            dist.recv(torch.empty(1), 2, group=group)
        from_one.join(10)
        assert not from_one.is_alive()
    elif rank == 1:
        for _ in range(102):
            dist.send(ones(rank, 1), 0, group=group)
        dist.recv(sender := torch.tensor([0]), 0, group=group)
        if sender.item() == 1:
            dist.send(ones(rank, 1), 0, group=group)
    elif rank == 2:
        time.sleep(0.5)
        dist.send(ones(rank, 1), 0, group=group)
    agree(True)
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(3)
def test_two_threads_receive_lists_from_any_rank(rank: int) -> None:
    """A list is two messages: the other thread took the second one for the first message of its list."""
    if rank == 0:
        lists: list[list[object]] = [[None], [None]]
        assert all(ended([threading.Thread(target=dist.recv_object_list, args=(each,), daemon=True) for each in lists]))
        agree(sorted(lists, key=str) == [["of rank 1" * 1000], ["of rank 2" * 1000]], lists)
    else:
        if rank < 3:
            dist.send_object_list([f"of rank {rank}" * 1000], 0)
        agree(True)


def slowly(look: Callable[..., Any]) -> Callable[..., Any]:
    """Lets other threads run between a look that finds a message and what follows."""

    def call(*arguments: Any) -> Any:
        if (found := look(*arguments)) is not None:
            time.sleep(0.05)
        return found

    return call


def ended(threads: list[threading.Thread]) -> list[bool]:
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # less than `slowly`
    for thread in threads:
        thread.join(10)
    return [not thread.is_alive() for thread in threads]


def test_largest_tag(rank: int, size: int) -> None:  # trap 14
    """All but 1040 of the MPI's tags are usable; the next tag and negative ones are refused, before a byte moves."""
    limit = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - 1040
    mine, other = ones(rank), torch.empty(4)
    work = dist.irecv(other, (rank - 1) % size, tag=limit)
    dist.isend(mine, (rank + 1) % size, tag=limit).wait()
    work.wait()
    for tag in (-1, limit + 1, -(2**40), 2**40):
        for call in (dist.isend, dist.irecv, *((dist.send, dist.recv) if size > 1 else ())):
            with pytest.raises(ValueError, match=rf"{call.__name__}: tag {tag} is out of range; this MPI takes 0 to {limit}"):
                call(torch.ones(4), (rank + 1) % size, tag=tag)
    agree(same(other, ones((rank - 1) % size)), other)


@pytest.mark.parametrize("count", [9, 100, BIG])
@pytest.mark.parametrize("call", ["recv", "irecv", "any source", "any source, irecv"])
@pytest.mark.parametrize("early", [False, True])
def test_smaller_buffer(call: str, count: int, early: bool, rank: int, size: int) -> None:  # trap 16
    """TruncationError, which names sizes; the group and the next message are unharmed. ``early``: MPI has the message before."""
    after, before = (rank + 1) % size, (rank - 1) % size
    work = dist.isend(ones(rank, count), after)
    if early:
        behind = dist.isend(ones(rank), after, tag=1)
        dist.irecv(torch.empty(4), before, tag=1).wait()
        behind.wait()
    buffer = torch.empty(8, dtype=torch.float32)
    text = rf"\(rank {rank} of {size}\): .*longer than the tensor .*, of 32 bytes \(shape \(8,\), torch.float32\)"

    def receive() -> None:
        if call.endswith("irecv") or size == 1:
            dist.irecv(buffer, before if call == "irecv" else None).wait()
        else:
            dist.recv(buffer, before if call == "recv" else None)

    with pytest.raises(dist.TruncationError, match=text) as caught:
        receive()
    assert isinstance(caught.value, RuntimeError)
    work.wait()
    again = torch.empty(8)
    work = dist.isend(ones(rank, 8), after)
    dist.irecv(again, before).wait()
    work.wait()
    total = torch.ones(2)
    dist.all_reduce(total)
    agree(same(again, ones(before, 8)) and same(total, ones(size, 2)), again)


@pytest.mark.parametrize("matched_here", [False, True])
def test_the_size_of_a_shorter_message(rank: int, size: int, matched_here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills the front (trap 16). "matched_here": as if MPI wrote too long messages past the end."""
    communicator = groups.of(None)
    assert communicator is not None
    if matched_here:
        monkeypatch.setattr(communicator.host.messages, "unmatched", Unmatched(communicator.channel))
    buffer = torch.full((8,), -1.0)
    work = dist.irecv(buffer, (rank - 1) % size)
    dist.isend(ones(rank, 3), (rank + 1) % size).wait()
    work.wait()
    expected = torch.tensor([*[float((rank - 1) % size)] * 3, *[-1.0] * 5])
    agree(work.received_nbytes() == 12 and same(buffer, expected), (work.received_nbytes(), buffer))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("matched_here", [False, True])
def test_receives_from_any_rank_between_others(
    early: bool, matched_here: bool, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All get the messages in their order. "matched_here": as over UCX of MPICH, which loses messages that are "early"."""
    group = dist.new_group()
    communicator = groups.of(group)
    assert communicator is not None
    if matched_here:
        messages = communicator.host.messages
        monkeypatch.setattr(messages, "_from_any", messages.unmatched or Unmatched(communicator.channel))
    buffers, sent = [torch.empty(4) for _ in range(4)], []
    if rank == 1:
        sent = [dist.isend(ones(number), 0, group=group) for number in range(4)]
    if early:
        dist.barrier(group)
    works = [dist.irecv(buffer, src, group=group) for buffer, src in zip(buffers, (1, None, 1, None), strict=True) if rank == 0]
    if not early:
        dist.barrier(group)
    for work in (*works[::-1], *sent):
        work.wait()
    agree(rank != 0 or all(same(buffer, ones(number)) for number, buffer in enumerate(buffers)), buffers)
    if rank == 1:
        dist.send(ones(7), 0, group=group)
    last = torch.empty(4)
    source = dist.recv(last, group=group) if rank == 0 else 1
    agree(source == 1 and (rank != 0 or same(last, ones(7))), (source, last))
    dist.destroy_process_group(group)


@pytest.mark.parametrize("call", ["recv", "irecv", "any source"])
@pytest.mark.parametrize("count", [1, 9, BIG])
def test_no_room(call: str, count: int, rank: int, size: int) -> None:  # trap 16
    """A message to a tensor without elements is too long, an empty one is not."""
    after, before = (rank + 1) % size, (rank - 1) % size
    work = [dist.isend(torch.ones(n, dtype=torch.uint8), after) for n in (count, 0)]

    def receive() -> None:
        if call == "irecv" or size == 1:
            dist.irecv(torch.empty(0), before).wait()
        else:
            dist.recv(torch.empty(0), before if call == "recv" else None)

    with pytest.raises(dist.TruncationError, match="of 0 bytes"):
        receive()
    receive()
    for each in work:
        each.wait()
    agree(True)


def test_message_to_oneself(rank: int, size: int) -> None:  # trap 13
    """By isend and irecv in either order, small and large; the blocking calls would wait for ever and say so."""
    for count in (0, 3, BIG):
        first, second = torch.empty(count), torch.empty(count)
        works = [dist.isend(ones(rank, count), rank, tag=1), dist.irecv(first, rank, tag=1)]
        works += [dist.irecv(second, rank, tag=2), dist.isend(ones(rank, count), rank, tag=2)]
        for work in works:
            work.wait()
        assert same(first, ones(rank, count))
        assert same(second, ones(rank, count))
    for call, other in ((dist.send, "isend"), (dist.recv, "irecv")):
        with pytest.raises(ValueError, match=f"cannot be its own peer in a blocking call; use {other}"):
            call(torch.ones(3), rank)
        with pytest.raises(ValueError, match="cannot be its own peer"):
            call(torch.ones(3), **{"group_dst" if call is dist.send else "group_src": rank})
    agree(True)


def test_irecv_delivers_before_it_completes(rank: int, size: int) -> None:  # trap 18
    """Into a transposed tensor: whoever is told by the Future finds the values there."""
    wide = torch.zeros(5, 3).t()
    work = dist.irecv(wide, (rank - 1) % size)
    seen = work.get_future().then(lambda future: future.value()[0].clone())
    dist.isend(of_rank(rank, torch.float32, (3, 5)), (rank + 1) % size).wait()
    agree(same(seen.wait(), of_rank((rank - 1) % size, torch.float32, (3, 5))))


def test_a_batch_has_a_work_for_each_operation(rank: int, size: int) -> None:  # trap 21
    """An operation may be named by torch's function."""
    received, before = torch.empty(4), (rank - 1) % size
    receive = dist.P2POp(torch.distributed.irecv, received, group_peer=before)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(rank), (rank + 1) % size), receive])
    assert len(works) == 2
    assert all(isinstance(work, dist.Work) and work.wait() for work in works)
    agree(same(received, ones(before)))


def test_batch_refuses(rank: int, size: int) -> None:  # trap 21
    with pytest.raises(TypeError, match="must be a list of P2POp"):
        dist.batch_isend_irecv([dist.isend])
    with pytest.raises(TypeError, match="must be a list of P2POp"):
        dist.batch_isend_irecv(dist.P2POp(dist.isend, torch.ones(1), (rank + 1) % size or 0))
    with pytest.raises(ValueError, match="empty"):
        dist.batch_isend_irecv([])
    with pytest.raises(ValueError, match="op"):
        dist.P2POp(dist.broadcast, torch.ones(1), 0)
    group = dist.new_group(list(range(size)))
    with pytest.raises(ValueError, match="same group"):
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(1), rank), dist.P2POp(dist.isend, torch.ones(1), rank, group=group)]
        )
    dist.destroy_process_group(group)
    agree(True)
