"""Who drives what is under way: threads that come when needed, sleep when idle, and go with the world."""

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import mpicoll as dist
from mpicoll._engine.poller import TESTS, Poller, poller
from mpicoll._engine.work import Work
from tests.support import agree

IDLE_S = 1.0
BUSY = 0.3  # of a core: far above what 1000 wake-ups a second cost, far below a spinning thread


def ours() -> list[str]:
    """Not those of RPC: a function that an earlier test called there, and that RPC ended without, may still sleep."""
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if name.startswith("mpicoll") and not name.startswith("mpicoll rpc"))


def test_threads_come_when_needed_and_go_with_the_world(rank: int, size: int, pytestconfig: pytest.Config) -> None:
    """Without GPUs rank 0 of several has one more, which answers for the store, also when the world has gone.

    So does the one that watches, where ranks of other nodes may still ask.
    """
    gpus = pytestconfig.getoption("--as-if-gpus") or torch.cuda.is_available()
    store = ["store"] * (rank == 0 and size > 1 and not gpus)
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    stay = {"mpicoll store"} if node.Get_size() == size else {"mpicoll store", "mpicoll watch"}
    node.Free()
    if dist.is_initialized():
        dist.destroy_process_group()
    agree(set(ours()) <= stay, f"{ours()}")
    for _ in range(2):
        dist.init_process_group()
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        seen = [name.split()[1] for name in ours()]
        agree(seen == [*store, "watch"], f"synchronous calls need no thread: {seen}")
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        received = torch.zeros(1)
        work = dist.irecv(received, (rank - 1) % size, tag=1)
        seen = ours()
        dist.barrier()
        dist.isend(torch.ones(1), (rank + 1) % size, tag=1).wait()
        work.wait()
        agree([name.split()[1] for name in seen] == ["poller", "queue", *store, "watch"], f"{seen}")
        dist.destroy_process_group()
        agree(set(ours()) <= stay, f"{ours()}")


@pytest.mark.usefixtures("world")
def test_the_poller_sleeps_while_a_thread_waits_and_then_takes_over(rank: int, size: int) -> None:
    first, second = torch.zeros(1), torch.zeros(1)
    awaited, left = (dist.irecv(tensor, (rank - 1) % size, tag=tag) for tag, tensor in enumerate((first, second), 6))
    waits = threading.Thread(target=awaited.wait)
    waits.start()
    deadline = time.monotonic() + 20
    while not (asleep := poller._asleep) and time.monotonic() < deadline:
        time.sleep(0.01)
    dist.barrier()
    dist.isend(torch.ones(1), (rank + 1) % size, tag=6)
    waits.join()
    dist.isend(torch.ones(1), (rank + 1) % size, tag=7)
    while not second.item() and time.monotonic() < deadline:  # is_completed would move it
        time.sleep(0.01)
    left.wait()
    agree(asleep and bool(first.item()) and time.monotonic() < deadline, f"asleep: {asleep}")


def woken(thread: threading.Thread, seconds: float) -> int:
    """How often the thread wakes in so many seconds."""

    def count() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    before = count()
    time.sleep(seconds)
    return count() - before


@pytest.mark.one_node
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("world")
def test_the_poller_seldom_takes_time_from_the_program(rank: int, size: int) -> None:
    """A look takes 30 to 50 us of the rank's time: 1000 looks a second slowed the computation of a rank by 5 %."""
    received = torch.zeros(1)
    work = dist.irecv(received, (rank - 1) % size, tag=8)
    thread = poller._thread
    assert thread is not None
    dist.barrier()
    pending = woken(thread, IDLE_S)
    dist.barrier()
    dist.isend(torch.ones(1), (rank + 1) % size, tag=8)
    work.wait()
    idle = woken(thread, 20e-3) + woken(thread, IDLE_S)
    agree(pending < 400 * IDLE_S and idle < 20, f"woken {pending} times with a message pending, then {idle} times")


@pytest.mark.usefixtures("world")
def test_idle_threads_burn_no_core(rank: int, size: int) -> None:  # trap 70
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    received = torch.zeros(1)
    work = dist.irecv(received, (rank - 1) % size, tag=5)
    dist.barrier()
    before, began = time.process_time(), time.monotonic()
    time.sleep(IDLE_S)
    share = (time.process_time() - before) / (time.monotonic() - began)
    dist.barrier()
    dist.isend(torch.ones(1), (rank + 1) % size, tag=5)
    work.wait()
    agree(share < BUSY, f"{share:.0%} of a core with one receive pending")


class Moving:
    """A message that has moved after so many tests."""

    class transfer:
        moved = False

    def __init__(self, parts: int) -> None:
        self.parts, self.tests = parts, 0

    def test(self) -> bool:
        self.tests += 1
        return self.tests >= self.parts

    def _complete(self, error: Exception | None) -> None:
        assert error is None


def test_a_look_tests_a_message_several_times_and_many_messages_once() -> None:
    """Over some networks each test moves a small part."""
    one, looks = Moving(TESTS), Poller()
    looks._pending = {one: None}  # type: ignore[dict-item]
    assert looks.poll(TESTS)
    assert not looks._pending
    many = [Moving(TESTS) for _ in range(TESTS)]
    looks._pending = dict.fromkeys(many)  # type: ignore[arg-type]
    assert not looks.poll(TESTS)
    assert [each.tests for each in many] == [1] * TESTS


def test_an_operation_that_ends_at_the_time_limit_of_wait() -> None:
    """Either it has ended, or the limit has passed, which makes the group unusable."""
    work, failed = Work("test", [], 10.0), list[Exception]()
    work._on_timeout = failed.append
    work._culprits = lambda: "it ends now" if work._complete() else ""
    assert work.wait(1e-3) is True
    assert failed == []
    assert work.is_success()
