"""Operations that do not end in time raise, and say which, where; the group is refused from then on (traps 42, 61, 75)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import mpicoll as dist
from mpicoll._api import groups
from mpicoll._engine import monitored_barrier
from tests.support import agree, everyone

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.min_ranks(2)]

SHORT = timedelta(seconds=0.3)


def raised_by(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  the tests look at it
        return error
    return None


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
        if not isinstance(error, dist.GroupFailed) or cause not in str(error):
            wrong.append(repr(error))
    return wrong


def test_wait_that_expires(rank: int, size: int) -> None:
    """Rank 0 waits for a collective that the others start only later; meanwhile the other groups work."""
    group, other = dist.new_group(), dist.new_group()
    tensor, wrong = torch.ones(3), []
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        began = time.monotonic()
        errors = [raised_by(lambda: work.wait(SHORT)), raised_by(work.wait), work.exception()]
        took = time.monotonic() - began
        where = f"all_reduce on group '{group.group_name}' (rank 0 of {size})"
        wrong = [
            repr(error)
            for error in errors
            if not isinstance(error, dist.OperationTimeout)
            or not isinstance(error, TimeoutError)
            or not isinstance(error, RuntimeError)
            or where not in str(error)
        ]
        if not 0.25 < took < 20 or work.is_success() or not work.is_completed():
            wrong.append(f"{took} s, {work}")
        wrong += refused(group, rank, size, "Timed out: no end within the timeout of 0.3 s")
    everyone(None)
    if rank != 0:
        dist.all_reduce(tensor, group=group, async_op=True).wait()  # rank 0's, left in MPI, takes part
    late = torch.ones(1)
    dist.all_reduce(late, group=other)
    agree(not wrong and late.item() == size, f"{wrong}")
    dist.destroy_process_group(group)
    dist.destroy_process_group(other)


def test_torch_s_words_and_classes(rank: int, size: int) -> None:
    """Programs for torch catch DistBackendError and look for (Timed out|closed|timeout); one barrier after the other expires."""
    wrong = []
    calls: list[Callable[[Any], object]] = [
        lambda group: torch.distributed.irecv(torch.zeros(1), (rank + 1) % size, group=group).wait(SHORT),
        lambda group: dist.barrier(group=group, timeout=SHORT),
        lambda group: dist.monitored_barrier(group, SHORT),
    ]
    for call in calls:
        group = dist.new_group()
        error = raised_by(partial(call, group)) if rank == 0 else None
        everyone(None)
        words = [word for word in ("Timed out", "timeout") if word not in str(error)]
        if rank == 0 and (words or not isinstance(error, torch.distributed.DistBackendError)):
            wrong.append(repr(error))
        if rank == 0 and not isinstance(raised_by(partial(dist.barrier, group)), torch.distributed.DistError):
            wrong.append("a group that has failed")
        dist.destroy_process_group(group)
    agree(not wrong, wrong)


def test_a_receive_that_expires(rank: int, size: int) -> None:
    group = dist.new_group()
    work = dist.irecv(torch.zeros(1), (rank + 1) % size, group=group)
    error = raised_by(lambda: work.wait(SHORT))
    text = f"irecv on group '{group.group_name}' (rank {rank} of {size}): Timed out: no end within the timeout of 0.3 s"
    agree(isinstance(error, dist.OperationTimeout) and text in str(error), repr(error))
    wrong = refused(group, rank, size, "Timed out: no end within the timeout of 0.3 s")
    agree(not wrong, f"{wrong}")
    dist.destroy_process_group(group)


def test_a_barrier_that_expires(rank: int, size: int) -> None:
    group, error = dist.new_group(), None
    if rank == 0:
        error = raised_by(lambda: dist.barrier(group=group, timeout=SHORT))
    everyone(None)
    expected = (
        f"barrier on group '{group.group_name}' (rank 0 of {size}): Timed out: not every rank came within the timeout of 0.3 s"
    )
    agree(rank != 0 or (isinstance(error, dist.OperationTimeout) and expected in str(error)), repr(error))
    wrong = refused(group, rank, size, "not every rank came") if rank == 0 else []
    agree(not wrong, f"{wrong}")
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


def test_monitored_barrier_when_rank_0_is_missing(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitored_barrier, "ANSWER_OF_FIRST_S", 0.5)
    group, error = dist.new_group(), None
    if rank != 0:
        error = raised_by(lambda: dist.monitored_barrier(group, timedelta(seconds=0.2)))
    agree(rank == 0 or (isinstance(error, dist.OperationTimeout) and "rank 0 did not come" in str(error)), repr(error))
    dist.destroy_process_group(group)


def test_a_message_that_is_too_long(rank: int, size: int) -> None:  # trap 16
    """The receiver gets an error that names the sizes; nothing else is harmed, and the group goes on."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for tag, blocking in enumerate((False, True)):
        sent = dist.isend(torch.ones(10), right, tag=tag)
        short = torch.zeros(4)
        if blocking:
            error = raised_by(partial(dist.recv, short, left, tag=tag))
        else:
            error = raised_by(dist.irecv(short, left, tag=tag).wait)
        named = "16 bytes" in str(error) and f"(rank {rank} of {size})" in str(error)
        agree(isinstance(error, dist.TruncationError) and named, repr(error))
        sent.wait()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    agree(tensor.item() == size)


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


@pytest.mark.parametrize("api", [dist, torch.distributed], ids=["mpicoll", "torch"])
def test_a_negative_timeout_is_refused(api: Any, rank: int, size: int) -> None:
    """Before anything is sent: what comes after it works."""
    if api.is_initialized():
        api.destroy_process_group()
    past = timedelta(seconds=-1)
    with pytest.raises(ValueError, match="init_process_group: a timeout must not be negative, got -1 s"):
        api.init_process_group("mpi", timeout=past)
    api.init_process_group("mpi")
    with pytest.raises(ValueError, match="new_group: a timeout must not be negative"):
        api.new_group(timeout=past)
    with pytest.raises(ValueError, match="monitored_barrier: a timeout must not be negative"):
        dist.monitored_barrier(timeout=past)
    with pytest.raises(ValueError, match="barrier: a timeout must not be negative"):
        dist.barrier(timeout=past)
    group, total = api.new_group(), torch.ones(1)
    work = api.all_reduce(total, group=group, async_op=True)
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
    api.destroy_process_group()


@pytest.mark.parametrize("api", [dist, torch.distributed], ids=["mpicoll", "torch"])
def test_the_default_comes_from_the_environment(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICOLL_TIMEOUT counts where the program gives no timeout; a bad value is refused before anything is sent."""
    if api.is_initialized():
        api.destroy_process_group()
    monkeypatch.setenv("MPICOLL_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="MPICOLL_TIMEOUT='soon' is not allowed"):
        api.init_process_group("mpi")
    monkeypatch.setenv("MPICOLL_TIMEOUT", "70.5")
    api.init_process_group("mpi")
    named = api.new_group(timeout=timedelta(seconds=80))
    timeouts = [groups.of(group).timeout_s for group in (None, api.new_group(), named)]  # type: ignore[union-attr]
    agree(timeouts == [70.5, 70.5, 80], timeouts)
    api.destroy_process_group()
