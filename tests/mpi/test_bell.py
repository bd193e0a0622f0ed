"""The bells of a node: who waits is woken by what it waits for, and nobody else is."""

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
import torch.distributed

import mpicoll as dist
from mpicoll import rpc
from mpicoll._api import groups
from mpicoll._mpi import bell
from mpicoll._mpi.backoff import Backoff, Naps
from mpicoll._mpi.boards import NBYTES, Boards
from mpicoll._mpi.shared_segment import Segment
from tests.support import agree, is_open_mpi

pytestmark = pytest.mark.one_node

NAP_S = 20.0  # of the sleepers of these tests: without a ring they would sleep for all of it


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch, world: object) -> Iterator[list[int]]:
    """How often this rank rings, and how often it is woken."""
    counts = [0, 0]
    ring, sleep = bell.bell.ring, bell.bell.sleep

    def counted(at: int) -> None:
        counts[0] += 1
        ring(at)

    def slept(rings: int, seconds: float) -> bool:
        rang = sleep(rings, seconds)
        counts[1] += rang
        return rang

    # After 3 ms it sleeps for 3 s. A rank rings before it sends, and may be slow then: who has been woken sleeps 3 s once more.
    monkeypatch.setattr(Backoff, "WOKEN_NAPS", Naps(1e-3, NAP_S, 1000.0))
    monkeypatch.setattr(bell.bell, "ring", counted)
    monkeypatch.setattr(bell.bell, "sleep", slept)
    dist.barrier()
    yield counts
    dist.barrier()


def _recv(rank: int, last: int) -> None:
    if rank == last:
        dist.send(torch.ones(2), 0)
    elif rank == 0:
        dist.recv(torch.empty(2), last)


def _wait(rank: int, last: int) -> None:
    if rank == last:
        dist.send(torch.ones(2), 0)
    elif rank == 0:
        dist.irecv(torch.empty(2), last).wait()


def _send(rank: int, last: int) -> None:
    large = torch.ones(1 << 22)  # libfabric over TCP takes 256 KiB, and the send ends before its receive
    if rank == last:
        dist.recv(large, 0)
    elif rank == 0:
        dist.send(large, last)


def _all_reduce(rank: int, last: int) -> None:
    dist.all_reduce(torch.ones(2))


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("operation", [_recv, _wait, _send, _all_reduce])
def test_a_rank_is_woken(operation: Callable[[int, int], None], rings: list[int], rank: int, size: int) -> None:
    last = size - 1
    if rank == last:
        time.sleep(0.3)  # the others are asleep
    began = time.monotonic()
    operation(rank, last)
    took = time.monotonic() - began
    agree(took < NAP_S / 2, took)
    waits = rank != last and (operation is _all_reduce or rank == 0)
    agree(rings[1] >= waits, rings)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_who_waits_for_a_key_is_woken(late: int, rings: list[int], rank: int, size: int) -> None:
    """Rank 0 has the keys: it waits for one that another rank sets, or another rank for one of its own."""
    store = torch.distributed.distributed_c10d._get_default_store()
    before, began = rings[:], time.monotonic()
    if rank == late:
        time.sleep(0.3)  # the others are asleep
        store.set(f"late {late}", "value")
    else:
        store.get(f"late {late}")
    took = time.monotonic() - began
    agree(took < NAP_S / 2, took)
    agree(rings == before, (before, rings))  # not by the bell that collectives look at


@pytest.mark.min_ranks(2)
def test_who_waits_for_a_call_is_woken(rings: list[int], rank: int, size: int) -> None:
    rpc.init_rpc(f"worker{rank}")
    try:
        dist.barrier()
        began = time.monotonic()
        if rank == 0:
            rpc.rpc_sync(f"worker{size - 1}", time.sleep, (0.3,))
            rpc.rpc_sync("worker0", time.sleep, (0.3,))
        took = time.monotonic() - began
    finally:
        rpc.shutdown()
    agree(took < NAP_S / 2, took)


@pytest.mark.min_ranks(2)
@pytest.mark.skipif(not is_open_mpi(), reason="with MPICH the receiver copies alone, in one call")
def test_nobody_sleeps_while_the_tensor_of_a_call_moves(world: object, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI moves some fragments for each test: 64 MiB there and back after a pause took 45 ms, and took 16."""
    naps, sleep = list[float](), bell.Bell.sleep
    rpc.init_rpc(f"worker{rank}")
    try:
        transport = rpc.api.Agent.get()._transport

        def counted(itself: bell.Bell, rings: int, seconds: float) -> bool:
            of_rpc = itself is bell.services and threading.current_thread().name != "mpicoll store"
            if of_rpc and (transport._sending or transport._receiving):
                naps.append(seconds)
            return sleep(itself, rings, seconds)

        dist.barrier()
        monkeypatch.setattr(bell.Bell, "sleep", counted)
        if rank == 0:
            time.sleep(0.03)  # the other worker sleeps
            rpc.rpc_sync("worker1", torch.neg, (torch.ones(16 << 20),))
    finally:
        rpc.shutdown()
    monkeypatch.undo()
    agree(sum(naps) == 0, naps)


@pytest.mark.min_ranks(3)
def test_only_the_late_rank_rings(rings: list[int], rank: int, size: int) -> None:
    """The others are awake when they come. The last one wakes each of them once."""
    for late in range(size):
        dist.barrier()
        before = rings[0]
        if rank == late:
            time.sleep(0.3)
        dist.all_reduce(torch.ones(2))
        agree(rings[0] - before <= (size - 1 if rank == late else size - 2), (late, rings[0] - before))


def test_whom_a_rank_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 ranks in one process: a rank that comes wakes those that sleep for it, and looks at nobody while none does."""
    segment, ranks = Segment(mmap.mmap(-1, 128 * NBYTES), ordered=True), range(128)
    bells = [bell.Bell(Boards(segment, ranks, own), own) for own in ranks]
    rung: list[int] = []
    for each in bells:
        monkeypatch.setattr(each, "_call", lambda at, what, value, limit: rung.append(at))
    words, wanted = bells[0].words, [at + bell.WANTED for at in bells[0].places(tuple(ranks))]

    for own in range(100):
        bells[own].listen(127)
    bells[100].listen(126)
    bells[101].listen(None)  # for any message
    assert [rank for rank in ranks if words[wanted[rank]]] == [126, 127]
    bells[126].come()
    assert rung == [bells[0].places((rank,))[0] for rank in (100, 101)]
    rung.clear()
    bells[127].come()
    assert rung == bells[0].places(tuple(range(100)))
    assert not any(words[wanted[rank]] or words[wanted[rank] - bell.WANTED] for rank in ranks)


def test_who_waits_for_a_message_of_whom() -> None:
    segment, ranks = Segment(mmap.mmap(-1, 3 * NBYTES), ordered=True), range(3)
    bells = [bell.Bell(Boards(segment, ranks, own), own) for own in ranks]
    with bell.Meeting(bells[0], 1):
        assert [each.meets(0) for each in bells] == [False, True, False]
        with bell.Meeting(bells[0], 2):
            assert [each.meets(0) for each in bells] == [False, False, True]
        assert bells[1].meets(0)
    assert not bells[1].meets(0)
    one, two = bell.Meeting(bells[0], 1), bell.Meeting(bells[0], 2)  # of two threads: the first one ends first
    one.__enter__()
    two.__enter__()
    one.__exit__()
    assert [each.meets(0) for each in bells] == [False, False, True]
    two.__exit__()
    assert not any(each.meets(0) for each in bells)
    assert not bells[1].meets(None)
    assert not bells[1].meets(3)  # of another node


def test_who_is_woken_by_a_wait_for_its_message_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round it looked too early, did not see that a large message may move, and slept again."""
    segment, ranks = Segment(mmap.mmap(-1, 3 * NBYTES), ordered=True), range(3)
    bells = [bell.Bell(Boards(segment, ranks, own), own) for own in ranks]
    seen = []
    monkeypatch.setattr(bells[0], "ring", lambda at: seen.append((at, bells[1].meets(0))))
    bells[1].listen(2)
    with bell.Meeting(bells[0], 1):
        assert seen == []  # it sleeps for another one
    bells[1].listen(0)
    with bell.Meeting(bells[0], 1):
        assert seen == [(bells[0].places([1])[0], True)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("module", [dist, torch.distributed], ids=lambda module: module.__name__)
@pytest.mark.parametrize("way", ["exchange", "there and back"])
@pytest.mark.skipif(not is_open_mpi(), reason="with MPICH the receiver copies alone, in one call")
def test_nobody_sleeps_while_a_large_message_moves(
    way: str, module: ModuleType, world: object, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI moves some fragments for each test, and none while one side sleeps: 64 MiB both ways took 450 ms instead of 30."""
    naps, sleep = list[float](), bell.Bell.sleep

    def counted(itself: bell.Bell, rings: int, seconds: float) -> bool:
        # Not while the other side is between two waits, or has no core. The poller may serve a window: it does not wait.
        waits = threading.current_thread() is threading.main_thread()
        if waits and itself is bell.bell and itself.words[itself.at[peer] + bell.MEETS] == rank + 1:
            naps.append(seconds)
        return sleep(itself, rings, seconds)

    sent, received, peer = torch.ones(16 << 20), torch.zeros(16 << 20), 1 - rank
    dist.barrier()
    monkeypatch.setattr(bell.Bell, "sleep", counted)
    if way == "exchange":
        works = module.isend(sent, peer), module.irecv(received, peer)
        for work in works:
            work.wait()
    else:
        for turn in range(2):
            module.send(sent, peer) if turn == rank else module.recv(received, peer)
    monkeypatch.undo()
    agree(sum(naps) < 10e-3 and bool(received.all()), f"{naps}")


def test_who_waits_or_rings_outlives_the_bell_of_the_world(monkeypatch: pytest.MonkeyPatch, world: object, rank: int) -> None:
    """A program may destroy its world while another thread of it waits for a message, or while the poller matches one."""
    backoff, messages, groups_bell = Backoff(rank), groups.of(None).host.messages, bell.bell  # type: ignore[union-attr]
    monkeypatch.setattr(bell, "bell", bell.Bell())
    backoff._since -= 1.0
    for _ in range(2):
        backoff.pause()
    place = groups_bell.places([rank])[0]
    groups_bell.words[place] = bell.ANYBODY
    messages.wake(rank)
    agree(groups_bell.words[place] == 0)
