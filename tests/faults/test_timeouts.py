"""Operations that do not end in time raise, and say which, where; the group is refused from then on (traps 42, 61, 75)."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import mpicoll as dist
from mpicoll._api import groups
from mpicoll._faults import roll_call
from tests.support import agree, everyone, raised_by
from tests.support.doors import doors

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.min_ranks(2),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
]

SHORT = timedelta(seconds=0.3)


def refused(group: Any, rank: int, size: int, cause: str) -> list[str]:
    """What is wrong with the errors of operations on a group that has failed."""
    wrong = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1), group=group),
        lambda: dist.all_reduce(torch.ones(1), group=group, async_op=True),
        lambda: dist.barrier(group=group),
        lambda: dist.isend(torch.ones(1), (rank + 1) % size, group=group),
        lambda: dist.irecv(torch.ones(1), (rank + 1) % size, group=group),
    ):
        error = raised_by(call)  # type: ignore[arg-type]
        if (
            not isinstance(error, dist.GroupFailed)
            or not isinstance(error, torch.distributed.DistError)
            or cause not in str(error)
        ):
            wrong.append(repr(error))
    return wrong


def expired(error: BaseException | None, operation: str, group: Any, size: int) -> list[str]:
    """What is wrong with rank 0's error after SHORT, in words and classes that programs for torch look for, and afterwards."""
    where = re.escape(f"{operation} on group '{group.group_name}' (rank 0 of {size}): ")
    said = re.match(where + r"(Timed out: .* within the timeout of 0\.3 s)", str(error))
    classes = (dist.OperationTimeout, TimeoutError, RuntimeError, torch.distributed.DistBackendError)
    if said is None or not all(isinstance(error, each) for each in classes):
        return [repr(error)]
    return refused(group, 0, size, said[1])


@doors
@pytest.mark.parametrize("operation", ["all_reduce", "barrier", "irecv"])
def test_wait_that_expires(operation: str, door: Any, rank: int, size: int) -> None:
    """Rank 0 waits for what the others start only later, or never; meanwhile the other groups work."""
    group, other = dist.new_group(), dist.new_group()
    start: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: door.all_reduce(torch.ones(3), group=group, async_op=True),
        "barrier": lambda: door.barrier(group, async_op=True),
        "irecv": lambda: door.irecv(torch.zeros(1), size - 1, group=group),
    }
    wrong = []
    if rank == 0:
        work, began = start[operation](), time.monotonic()
        errors = [raised_by(lambda: work.wait(SHORT)), raised_by(work.wait), work.exception()]
        took = time.monotonic() - began
        for error in errors:
            wrong += expired(error, operation, group, size)
        if not 0.25 < took < 20 or work.is_success() or not work.is_completed():
            wrong.append(f"{took} s, {work}")
    everyone(None)
    if rank != 0 and operation != "irecv":
        start[operation]().wait()  # rank 0's, left in MPI, takes part
    late = torch.ones(1)
    dist.all_reduce(late, group=other)
    agree(not wrong and late.item() == size, f"{wrong}")
    dist.destroy_process_group(group)
    dist.destroy_process_group(other)


@doors
def test_a_future_that_cpp_waits_for_expires(door: Any, rank: int, size: int) -> None:
    """Nothing of ours runs in that wait. The operations queued behind the one that nobody comes to fail with it."""
    group, wrong = dist.new_group(timeout=timedelta(seconds=0.5)), ""
    first, then = torch.ones(3), torch.ones(3)
    if rank == 0:
        began = time.monotonic()
        works = [door.all_reduce(tensor, group=group, async_op=True) for tensor in (first, then)]
        waits = {
            "wait_all": lambda: torch.futures.wait_all([work.get_future() for work in works]),
            "then": lambda: works[1].get_future().then(lambda future: future.value()[0]).wait(),
        }
        errors = {name: raised_by(wait) for name, wait in waits.items()}  # type: ignore[arg-type]
        took = time.monotonic() - began
        said = r"all_reduce on group .* \(rank 0 of \d+\): Timed out: no end within the timeout of 0\.5 s. Ranks? "
        wrong = "".join(f"{name}: {error!r}; " for name, error in errors.items() if not re.search(said, str(error)))
        wrong += "" if 0.4 < took < 10 else f"{took} s"
    everyone(None)
    if rank != 0:
        door.all_reduce(first, group=group, async_op=True).wait(timedelta(seconds=30))  # the other one never began on rank 0
    agree(not wrong, wrong)
    dist.destroy_process_group(group)


def test_a_longer_wait_has_its_own_limit(rank: int, size: int) -> None:
    group, total = dist.new_group(timeout=timedelta(seconds=0.3)), torch.ones(1)
    if rank == 0:
        time.sleep(1.5)
    dist.all_reduce(total, group=group, async_op=True).wait(timedelta(seconds=30))
    agree(total.item() == size, total)
    dist.destroy_process_group(group)


def test_a_receive_that_nobody_waits_for_has_no_limit(rank: int, size: int) -> None:
    """It may be posted long before its message is sent."""
    group, received = dist.new_group(timeout=timedelta(seconds=0.3)), torch.zeros(1)
    work = dist.irecv(received, (rank - 1) % size, group=group)
    time.sleep(1.5)
    pending = not work.is_completed()
    everyone(None)
    dist.send(torch.ones(1), (rank + 1) % size, group=group)
    work.wait()
    agree(pending and received.item() == 1, (pending, received))
    dist.destroy_process_group(group)


def test_a_barrier_may_wait_longer_than_the_group(rank: int, size: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    if rank == 0:
        time.sleep(0.8)
    dist.barrier(group=group, timeout=timedelta(seconds=30))
    agree(True)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_monitored_barrier_names_who_did_not_come(all_of_them: bool, rank: int, size: int) -> None:  # trap 61
    group = dist.new_group()
    dist.monitored_barrier(group)
    missing = list(range(1, size)) if all_of_them else [size - 1]
    error = None
    if rank not in missing:
        error = raised_by(lambda: dist.monitored_barrier(group, timedelta(seconds=1), wait_all_ranks=all_of_them))
    names = ", ".join(map(str, missing))
    expected = f"rank {names} did not come within the timeout of 1 s"
    right = isinstance(error, dist.OperationTimeout) and expected in str(error)
    agree(rank in missing or right, f"{error!r}, not: {expected}")
    agree(rank in missing or isinstance(raised_by(lambda: dist.barrier(group)), dist.GroupFailed))
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(2)
def test_a_rank_that_comes_too_late_to_monitored_barrier_hears_so_at_once(rank: int, size: int) -> None:
    """It waited for its own limit, and some seconds more."""
    group, late = dist.new_group(), size - 1
    if rank == late:
        time.sleep(1.5)
    since = time.monotonic()
    error = raised_by(lambda: dist.monitored_barrier(group, timedelta(seconds=60 if rank == late else 1)))
    took_s = time.monotonic() - since
    said = f"rank {late} did not come within the timeout of 1 s"
    agree(isinstance(error, dist.OperationTimeout) and said in str(error) and took_s < 5, (took_s, repr(error)))
    dist.destroy_process_group(group)


def test_monitored_barrier_when_rank_0_is_missing(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "ANSWER_OF_FIRST_S", 0.5)
    group, error = dist.new_group(), None
    if rank != 0:
        error = raised_by(lambda: dist.monitored_barrier(group, timedelta(seconds=0.2)))
    agree(rank == 0 or (isinstance(error, dist.OperationTimeout) and "rank 0 did not come" in str(error)), repr(error))
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)  # with more, a rank that has got the error passes nothing on, and those behind it wait
def test_an_error_of_mpi_itself_fails_the_group(rank: int, size: int) -> None:  # trap 75
    """Rank 0 broadcasts more than the others expect: they get MPI's error, and the group is refused there."""
    group = dist.new_group()
    tensor = torch.ones(1000 if rank == 0 else 10)
    error = raised_by(lambda: dist.broadcast(tensor, 0, group=group))
    agree(rank == 0 or isinstance(error, dist.CommunicationError), repr(error))
    agree(rank == 0 or f"broadcast on group '{group.group_name}' (rank {rank} of {size})" in str(error), repr(error))
    agree(rank == 0 or isinstance(raised_by(lambda: dist.barrier(group)), dist.GroupFailed))
    dist.destroy_process_group(group)
    fresh = torch.ones(1)
    dist.all_reduce(fresh)
    agree(fresh.item() == size)


@doors
def test_a_negative_timeout_is_refused(door: Any, rank: int, size: int) -> None:
    """Before anything is sent: what comes after it works."""
    if door.is_initialized():
        door.destroy_process_group()
    past = timedelta(seconds=-1)
    with pytest.raises(ValueError, match="init_process_group: a timeout must not be negative, got -1 s"):
        door.init_process_group("mpi", timeout=past)
    door.init_process_group("mpi")
    with pytest.raises(ValueError, match="new_group: a timeout must not be negative"):
        door.new_group(timeout=past)
    with pytest.raises(ValueError, match="monitored_barrier: a timeout must not be negative"):
        dist.monitored_barrier(timeout=past)
    with pytest.raises(ValueError, match="barrier: a timeout must not be negative"):
        dist.barrier(timeout=past)
    group, total = door.new_group(), torch.ones(1)
    work = door.all_reduce(total, group=group, async_op=True)
    work.wait()
    agree(total.item() == size, total)
    if rank == 0:
        pending = dist.irecv(total, size - 1)
        with pytest.raises(ValueError, match="wait: a timeout must not be negative"):
            pending.wait(past)
    everyone("the receive is pending")
    if rank == size - 1:
        dist.send(torch.zeros(1), 0)
    if rank == 0:
        pending.wait()
    agree(total.item() == (0 if rank == 0 else size), total)
    door.destroy_process_group()


@doors
def test_the_default_comes_from_the_environment(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICOLL_TIMEOUT counts where the program gives no timeout; a bad value is refused before anything is sent."""
    if door.is_initialized():
        door.destroy_process_group()
    monkeypatch.setenv("MPICOLL_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MPICOLL_TIMEOUT='soon' is not allowed"):
        door.init_process_group("mpi")
    monkeypatch.setenv("MPICOLL_TIMEOUT", "70.5")
    door.init_process_group("mpi")
    named = door.new_group(timeout=timedelta(seconds=80))
    timeouts = [groups.of(group).timeout_s for group in (None, door.new_group(), named)]  # type: ignore[union-attr]
    named.set_timeout(timedelta(seconds=81))
    timeouts.append(groups.of(named).timeout_s)  # type: ignore[union-attr]
    agree(timeouts == [70.5, 70.5, 80, 81], timeouts)
    door.destroy_process_group()
