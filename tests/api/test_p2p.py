"""Messages between two ranks: tags, order, any source, sizes that differ, messages to oneself, dropped handles."""

import pytest
import torch
from mpi4py import MPI

import mpicoll as dist
from mpicoll._api import groups
from mpicoll._host.matching import Unmatched
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
