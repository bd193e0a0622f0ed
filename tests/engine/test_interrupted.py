"""Handlers of signals, hooks and threads that come in the middle of an operation: they raise, send, or close its group."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll as dist
from mpicoll._api import groups
from mpicoll._engine.poller import Poller, pending, poller
from mpicoll._engine.registry import registry
from mpicoll._faults import watch
from mpicoll._faults.under_way import table
from tests.support import agree, raised_by


class Late(Exception):
    """What the handler of an alarm raises."""


def raising(*_: object) -> None:
    raise Late


class Transferred:
    """A `Transfer` whose test raises this error at first, and has ended from then on."""

    source, wrong, moved, nbytes = 0, "", False, 0

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def test(self) -> bool:
        if self.error is None:
            return True
        error, self.error = self.error, None
        raise error

    def cancel(self) -> bool:
        return True


def posted(group: Any, *transfers: Any) -> list[Any]:
    """Messages of these transfers, which have not ended."""
    works = [pending(group, "irecv", Transferred(None), torch.ones(1), 0) for _ in transfers]
    for work, transfer in zip(works, transfers, strict=True):
        work._done, work.transfer = False, transfer
    return works


@pytest.fixture
def alarm() -> Iterator[Callable[..., None]]:
    """Sets the handler of an alarm, and when it comes."""
    before = signal.getsignal(signal.SIGALRM)

    def after(seconds: float, handler: Any = raising) -> None:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield after
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("world")
def test_an_exception_before_a_collective_has_begun() -> None:
    """Its place is taken, so the group cannot be used. The next call kept a core busy for ever, and waited for this one."""
    group = dist.new_group()
    communicator: Any = groups.of(group)
    communicator.attendance.due, communicator.attendance.word = 0.0, raising
    agree(isinstance(raised_by(lambda: dist.all_reduce(torch.ones(1), group=group)), Late))
    error = raised_by(lambda: dist.all_reduce(torch.ones(1), group=group))
    agree(isinstance(error, dist.GroupFailed) and "Late has left it half done" in str(error), f"{error!r}")
    agree(not communicator.line.running.locked())


@pytest.mark.usefixtures("world")
def test_hooks_of_a_failed_group_may_use_others(rank: int, size: int) -> None:
    """The lock of the pending messages was held in them: a hook that receives waited for itself."""
    group, other = dist.new_group(), dist.new_group()
    communicator: Any = groups.of(group)
    received, works = torch.empty(1), list[Any]()
    communicator.abort_hooks[0] = lambda: works.append(dist.irecv(received, (rank - 1) % size, other))
    (work,) = posted(communicator, Transferred(MPI.Exception(MPI.ERR_OTHER)))
    poller.add(work)
    agree(isinstance(raised_by(work.wait), dist.CommunicationError))
    dist.barrier()
    dist.isend(torch.full((1,), float(rank)), (rank + 1) % size, other).wait()
    works[0].wait()
    agree(received.item() == (rank - 1) % size)


@pytest.mark.usefixtures("world")
def test_an_exception_of_a_handler_is_of_the_thread_that_waits() -> None:
    """It became the error of whichever message was tested at that moment, whose group failed."""
    communicator: Any = groups.of(None)
    of_this_test = Poller()
    works = posted(communicator, Transferred(None), Transferred(Late()))
    of_this_test._pending.update(dict.fromkeys(works))
    agree(isinstance(raised_by(of_this_test.poll), Late))
    agree([work.is_completed() for work in works] == [True, False])
    agree(of_this_test.poll() and works[1].is_completed() and communicator.broken is None)


@pytest.mark.usefixtures("no_world")
@pytest.mark.min_ranks(2)
def test_an_interrupted_destroy_is_finished(rank: int, size: int, alarm: Callable[..., None]) -> None:
    """The next world took what was left of this one, and its ranks waited for each other for ever."""
    dist.init_process_group()
    x, before = torch.ones(1), registry._world
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        alarm(0.2)
        error = raised_by(dist.destroy_process_group)
        assert isinstance(error, Late), repr(error)
        dist.destroy_process_group()
        del work
    else:
        time.sleep(0.5)
        dist.all_reduce(x)
        dist.destroy_process_group()
    dist.init_process_group()
    dist.all_reduce(total := torch.ones(1))
    agree(total.item() == size and registry._world is not before)


@pytest.mark.usefixtures("world")
@pytest.mark.min_ranks(2)
def test_a_handler_that_sends_in_the_middle_of_a_receive(rank: int, alarm: Callable[..., None]) -> None:
    """The receive ended with a KeyError of mpicoll, in place of its result."""
    x, y = torch.zeros(1), torch.zeros(1)
    dist.barrier()
    if rank == 0:
        alarm(0.2, lambda *_: dist.send(torch.ones(1), 1, tag=9))
        dist.recv(x, 1)
    elif rank == 1:
        dist.recv(y, 0, tag=9)
        dist.send(torch.full((1,), 2.0), 0)
    agree((x.item(), y.item()) == {0: (2, 0), 1: (0, 1)}.get(rank, (0, 0)), (x, y))
    agree(not table.inside)


@pytest.mark.usefixtures("world")
def test_a_receive_in_a_thread_whose_group_is_destroyed(rank: int, size: int) -> None:
    """It called MPI with the communicator that had been freed."""
    group, found = dist.new_group(), list[Any]()
    thread = threading.Thread(target=lambda: found.append(raised_by(lambda: dist.recv(torch.zeros(1), None, group))))
    thread.start()
    time.sleep(0.2)
    dist.destroy_process_group(group)
    thread.join(10)
    agree([type(error) for error in found] == [dist.GroupDestroyed], f"{found}")


@pytest.mark.usefixtures("world")
def test_a_hook_that_ends_its_thread_ends_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """sys.exit in a hook ended the thread that watches, and no limit held any more."""
    group, called = dist.new_group(), list[int]()
    communicator: Any = groups.of(group)
    communicator.abort_hooks.update({0: lambda: sys.exit(3), 1: lambda: called.append(1)})
    watch._call(communicator.call_abort_hooks)
    watch._call(lambda: sys.exit(3))
    agree(called == [1])
    assert capsys.readouterr().err.count("SystemExit: 3") == 2


@pytest.mark.usefixtures("world")
def test_a_handler_that_posts_and_waits_in_the_middle_of_a_wait(rank: int, size: int) -> None:
    """The lock of the pending messages was held: it waited for itself. What ended meanwhile ends once, with its own values."""
    communicator: Any = groups.of(None)
    received = torch.empty(1)

    class Interrupted(Transferred):
        def test(self) -> bool:
            if self.error is not None:
                self.error = None
                works = [dist.isend(torch.full((1,), float(rank)), (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
                for work in works:
                    work.wait()
            return True

    (work,) = posted(communicator, Interrupted(Late()))
    poller.add(work)
    work.wait()
    agree(received.item() == (rank - 1) % size and not poller.under_way(), f"{received}")


@pytest.mark.usefixtures("world")
def test_a_callback_polls_while_other_messages_have_ended() -> None:
    """They were tested again, after their end: an error was lost, and a receive had no sender."""
    communicator: Any = groups.of(None)
    of_this_test = Poller()
    works = posted(communicator, Transferred(None), Transferred(MPI.Exception(MPI.ERR_TRUNCATE)))
    of_this_test._pending.update(dict.fromkeys(works))
    works[0]._on_completion(of_this_test.poll)
    of_this_test.poll()
    agree(isinstance(raised_by(works[1].wait), dist.TruncationError) and works[0].is_completed())
