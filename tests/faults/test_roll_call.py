"""Ranks that wait for each other before they make a group: the missing are named, all raise, and all may try again."""

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import mpicoll as dist
from mpicoll._faults import roll_call
from mpicoll._mpi import runtime
from tests.support import agree, raised_by

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.min_ranks(2)]

LIMIT_S = 1.0


def error_of(call: Any) -> tuple[Exception | None, float]:
    began = time.monotonic()
    return raised_by(call), time.monotonic() - began


@pytest.mark.parametrize("missing_rank", [0, -1], ids=["first", "last"])
def test_a_rank_that_does_not_come_to_new_group(missing_rank: int, rank: int, size: int) -> None:
    missing = range(size)[missing_rank]

    def make() -> Any:
        return dist.new_group(timeout=timedelta(seconds=LIMIT_S))

    error, took = (None, 0.0) if rank == missing else error_of(make)
    expected = f"new_group (rank {rank} of {size}): Timed out: rank {missing} did not come within the timeout of {LIMIT_S:g} s"
    agree(rank == missing or str(error) == expected, repr(error))
    agree(took < LIMIT_S + 2, took)
    if rank == missing:  # too late
        error, took = error_of(make)
        assert took < LIMIT_S
    agree(isinstance(error, dist.OperationTimeout) and f"rank {missing} did not come" in str(error), repr(error))
    group, total = dist.new_group(), torch.ones(1)  # a collective of the group may take longer than this limit
    dist.all_reduce(total, group=group)
    agree(total.item() == size, total)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("late", ["last", "all but the last"])
def test_the_lowest_rank_that_waits_names_those_that_are_late(
    late: str, rank: int, size: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = [size - 1] if late == "last" else list(range(size - 1))
    monkeypatch.setattr(roll_call, "PATIENCE_S", 0.3)
    if rank in ranks:
        time.sleep(0.3 + roll_call.ANSWER_S + 1)
    group, total = dist.new_group(), torch.ones(1)
    dist.all_reduce(total, group=group)
    said = capfd.readouterr().err
    who = f"Rank {ranks[0]} has" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))} have"
    expected = rf"mpicoll: new_group \(rank {rank} of {size}\) has waited for \d s\. {who} not come\n"
    speaks = rank == min(set(range(size)) - set(ranks))
    agree(re.fullmatch(expected, said) if speaks else said == "", said)
    agree(total.item() == size, total)
    dist.destroy_process_group(group)


def test_all_who_are_missing_are_named(rank: int, size: int) -> None:
    """By a rank that is not the first one, which is missing, too."""
    last, error = size - 1, None
    if rank == last:
        error, _ = error_of(lambda: roll_call.everyone(runtime.start(), "a test", LIMIT_S))
    missing = ", ".join(map(str, range(last)))
    expected = f"a test (rank {last} of {size}): Timed out: rank {missing} did not come within the timeout of 1 s"
    agree(rank != last or str(error) == expected, repr(error))


def test_a_rank_that_came_earlier_and_has_a_shorter_limit(rank: int, size: int) -> None:
    """It gives up first, and tells so: the others do not wait for their own limits."""
    error, took = None, 0.0
    if rank == 0:
        error, took = error_of(lambda: roll_call.everyone(runtime.start(), "limits", LIMIT_S))
    elif rank < size - 1:
        error, took = error_of(lambda: roll_call.everyone(runtime.start(), "limits", 60))
    agree(rank == size - 1 or f"rank {size - 1} did not come within the timeout of 1 s" in str(error), repr(error))
    agree(took < LIMIT_S + 2, took)


def test_another_call_is_no_arrival(rank: int, size: int) -> None:
    operation = "one" if rank == 0 else "other"
    error, _ = error_of(lambda: roll_call.everyone(runtime.start(), operation, LIMIT_S))
    named = "rank 0" if rank else f"rank {', '.join(map(str, range(1, size)))}"
    agree(f"{operation} (rank {rank} of {size}): Timed out: {named} did not come" in str(error), repr(error))
