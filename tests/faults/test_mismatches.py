"""With MPICOLL_CHECK=1 every mismatch of collectives raises on all ranks, and no tensor has changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed

import mpicoll
from mpicoll._api import groups
from mpicoll._base.facts import ranks_in_words
from mpicoll._engine.registry import registry
from mpicoll._host.matching import Unmatched
from mpicoll._mpi.backoff import Backoff, Naps
from mpicoll.errors import CollectiveMismatch, OperationTimeout, TruncationError
from tests.faults.mismatches import pairs
from tests.support import agree, everyone

pytestmark = pytest.mark.min_ranks(2)
PAIRS = pairs()


@contextmanager
def compared() -> Iterator[None]:
    """The ranks of a group that is made inside compare each call, as with MPICOLL_CHECK=1."""
    assert registry._world is not None
    topology, agreed, ledger = registry._world
    registry._world = topology, agreed._replace(checks=True), ledger
    try:
        yield
    finally:
        registry._world = topology, agreed, ledger


@pytest.fixture(scope="module")
def module_group() -> Iterator[Any]:
    if not mpicoll.is_initialized():
        mpicoll.init_process_group()
    with compared():
        group = mpicoll.new_group()
    yield group
    mpicoll.destroy_process_group(group)


@pytest.fixture
def group(world: object, module_group: Any) -> Any:
    return module_group


@pytest.mark.parametrize("api", [mpicoll, torch.distributed], ids=["mpicoll", "torch"])
@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("culprit", ["first", "last"])
def test_all_kinds(group: Any, rank: int, size: int, api: ModuleType, async_op: bool, culprit: str) -> None:
    """One rank makes another call than the rest."""
    odd = 0 if culprit == "first" else size - 1
    wrong = []
    for usual, other in PAIRS:
        mine = other if rank == odd else usual
        try:
            work = mine.make(api, group, rank, size, async_op)
            if async_op:
                work.wait()
        except CollectiveMismatch as error:
            if f"rank {odd}: " not in str(error).lower() or str(error).count(": ") < 3:
                wrong.append(f"{usual} / {other}: {error}")
        else:
            wrong.append(f"{usual} / {other}: returned")
    agree(not wrong, "\n".join(wrong))


@pytest.mark.parametrize("api", [mpicoll, torch.distributed], ids=["mpicoll", "torch"])
def test_what_fits_works(group: Any, rank: int, size: int, api: ModuleType) -> None:
    for usual in dict.fromkeys(call for pair in PAIRS for call in pair):
        usual.make(api, group, rank, size, async_op=False)
    tensor = torch.tensor([rank])
    api.all_reduce(tensor, group=group)
    agree(tensor.item() == sum(range(size)))


def test_sizes_in_a_coalesced_call(group: Any, rank: int) -> None:
    """The ranks' tensors have the same number of elements together."""
    for sizes in ((8, 16), (16, 8)), ((8, 8), (16,)), ((8, 8), (4, 12)):
        tensors = [torch.ones(n) for n in sizes[rank > 0]]
        with pytest.raises(CollectiveMismatch, match=r"blocks of \[8, "):
            mpicoll.all_reduce_coalesced(tensors, group=group)
        agree(all(tensor.eq(1).all() for tensor in tensors), tensors)


MESSAGES = {
    "another dtype": (torch.ones(4), torch.zeros(4, dtype=torch.int32), "16 bytes of float32, and its tensor 16 bytes of int32"),
    "larger elements": (
        torch.ones(4),
        torch.zeros(2, dtype=torch.float64),
        "16 bytes of float32, and its tensor 16 bytes of float64",
    ),
    "too short": (torch.ones(4), torch.zeros(6), "16 bytes of float32, and its tensor 24 bytes of float32"),
    "nothing": (torch.ones(0), torch.zeros(3, 2).t(), "0 bytes of float32, and its tensor 24 bytes of float32"),
}


@pytest.mark.parametrize("way", ["blocking", "asynchronous", "from any rank", "matched here"])
@pytest.mark.parametrize("case", MESSAGES)
def test_messages(group: Any, rank: int, case: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver raises, and the next message is right. "matched here": as if MPI wrote too long messages past the end."""
    communicator = groups.of(group)
    assert communicator is not None
    if way == "matched here":
        monkeypatch.setattr(communicator.host.messages, "unmatched", Unmatched(communicator.channel))
    sent, received, words = MESSAGES[case]
    source = None if way == "from any rank" else 0
    if rank == 0:
        if way == "asynchronous":
            mpicoll.isend(sent, 1, group=group).wait()
        else:
            mpicoll.send(sent, 1, group=group)
        mpicoll.send(torch.arange(5.0), 1, group=group)
    elif rank == 1:
        receive = partial(mpicoll.recv, received.clone(), source, group=group)
        if way == "asynchronous":
            receive = mpicoll.irecv(received.clone(), source, group=group).wait
        with pytest.raises(CollectiveMismatch, match=words):
            receive()
        mpicoll.recv(right := torch.zeros(5), 0, group=group)
        assert right.equal(torch.arange(5.0))
    mpicoll.barrier(group)


@pytest.mark.parametrize("n", [3, 1 << 20])
def test_a_message_that_is_too_long(group: Any, rank: int, n: int) -> None:
    if rank == 0:
        mpicoll.send(torch.ones(n + 1), 1, group=group)
    elif rank == 1:
        with pytest.raises(TruncationError):
            mpicoll.recv(torch.zeros(n), 0, group=group)
    mpicoll.barrier(group)


def test_both_calls_are_named_and_no_data_moves(group: Any, rank: int, size: int) -> None:
    tensor = torch.full((2,), float(rank))
    with pytest.raises(CollectiveMismatch) as caught:
        mpicoll.broadcast(tensor, 0, group=group) if rank == 0 else mpicoll.all_reduce(tensor, group=group)
    said = str(caught.value)
    rest = ranks_in_words(range(1, size))
    agree(f"Rank 0: broadcast(float32, 2 elements, root 0); {rest}: all_reduce(SUM, float32, 2 elements)" in said, said)
    agree(tensor.eq(rank).all(), tensor)


def test_a_refusal_on_every_rank_is_nobodys_mismatch(group: Any, rank: int, size: int) -> None:
    with pytest.raises(ValueError, match="not in the group"):
        mpicoll.broadcast(torch.zeros(1), size + 7, group=group)
    tensor = torch.tensor([rank])
    mpicoll.all_reduce(tensor, group=group)
    agree(tensor.item() == sum(range(size)))


def test_a_rank_that_does_not_come_is_named(world: object, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check notices the limit after a nap, and raises. The watchdog looks meanwhile, and does not end the job."""
    ends = list[Any]()
    monkeypatch.setattr("mpicoll._faults.roll_call.Backoff", partial(Backoff, naps=Naps(0.6, 0.6, 0.0)))
    monkeypatch.setattr("mpicoll._faults.watchdog._end", lambda *words: ends.append(words))
    with compared():
        group = mpicoll.new_group(timeout=timedelta(seconds=1))
    said = ""
    if rank != size - 1:
        with pytest.raises(OperationTimeout) as caught:
            mpicoll.all_reduce(torch.zeros(1), group=group)
        said = str(caught.value)
    agree(rank == size - 1 or f"rank {size - 1} did not come within the timeout of 1 s" in said, everyone(said))
    agree(not ends, ends)
    mpicoll.destroy_process_group(group)
