"""What the watchdogs of many ranks say and do, without MPI: all ranks of a node are objects of this process."""

import mmap
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from mpicoll._base import waits
from mpicoll._base.facts import Facts
from mpicoll._faults import watchdog
from mpicoll._faults.call_comparison import Ledger, Mismatch
from mpicoll._faults.group_state import UnderWay
from mpicoll._faults.watchdog import MOST_BEFORE, Watchdog
from mpicoll._mpi import runtime
from mpicoll._mpi.boards import NBYTES, Boards
from mpicoll._mpi.shared_segment import Segment

pytestmark = pytest.mark.ranks(1)

RANKS = 48


@pytest.fixture
def groups() -> list[Any]:
    """The group of all ranks, as each rank of one node sees it."""
    segment, ranks = Segment(mmap.mmap(-1, RANKS * NBYTES), ordered=True), tuple(range(RANKS))
    return [
        Mock(
            rank=rank, global_ranks=ranks, size=RANKS, key="k", unseen=(), waits={}, named=None, history=(), checked=True,
            broken=None, patience_s=waits.PATIENCE_S, spans=False, channel=Mock(ranks=ranks),
            ledger=Ledger(Boards(segment, ranks, rank), True), where=lambda name, rank=rank: f"{name} (rank {rank} of {RANKS})",
        )
        for rank in ranks
    ]  # fmt: skip


def say(waiting: dict[int, UnderWay]) -> None:
    """Each of these ranks writes its board, then looks at its peers."""
    watchdogs = [Watchdog() for _ in waiting]
    for each, own in zip(waiting.values(), watchdogs, strict=True):
        own._read_ledgers([each.group], [each])
    for each, own in zip(waiting.values(), watchdogs, strict=True):
        own._look_at_peers(each, time.monotonic())


def ring(groups: list[Any], ranks: Iterator[int] | range, since: float) -> dict[int, UnderWay]:
    return {rank: UnderWay("recv", groups[rank], since, (rank + 1) % RANKS) for rank in ranks}


def test_one_rank_of_a_node_says_that_many_wait_for_messages(groups: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them printed its own line."""
    waiting = ring(groups, range(RANKS), time.monotonic() - waits.PATIENCE_S - 0.5)
    for _ in range(2):
        say(waiting)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("mpicoll: recv (rank 0 of 48) has waited for "), lines
    others = "rank 1 for rank 2, rank 2 for rank 3, rank 3 for rank 4, rank 4 for rank 5, and 43 more"
    assert lines[0].endswith(f". Other ranks of this node wait for messages, too: {others}"), lines


def test_what_only_one_rank_knows_is_said(groups: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that waits alone, one that began at another time, and one whose lower rank waits no more."""
    now = time.monotonic()
    long, lately = now - 10 * waits.PATIENCE_S, now - waits.PATIENCE_S - 0.5
    say({20: UnderWay("recv", groups[20], lately, None)})
    said = capsys.readouterr().err
    assert "(rank 20 of 48)" in said
    assert "Other ranks" not in said
    waiting = {3: UnderWay("recv", groups[3], long, 4), **ring(groups, range(7, 9), lately)}
    groups[20].ledger.messages = []
    groups[20].ledger.write([])
    say(waiting)
    said = capsys.readouterr().err
    assert [f"(rank {rank} of 48)" in said for rank in (3, 7, 8)] == [True, True, False], said
    groups[7].ledger.messages = []
    groups[7].ledger.write([])
    say({8: waiting[8]})
    assert "(rank 8 of 48)" in capsys.readouterr().err


def test_a_stopped_rank_speaks_for_nobody(groups: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    lately = time.monotonic() - waits.PATIENCE_S - 0.5
    waiting = ring(groups, range(2), lately)
    own = Watchdog()
    own._read_ledgers([groups[0]], [waiting[0]])
    stopped = subprocess.Popen(["sleep", "60"])
    try:
        read = groups[1].ledger.read
        groups[1].ledger.read = lambda rank: (known := read(rank)) and known._replace(pid=stopped.pid)
        stopped.send_signal(19)
        time.sleep(0.1)
        say({1: waiting[1]})
    finally:
        stopped.kill()
        stopped.wait()
    assert "(rank 1 of 48)" in capsys.readouterr().err


def test_lower_ranks_end_the_job_first_if_calls_differ(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second rank calls something else: 47 ranks found it and said it at the same moment."""
    slept: list[float] = []
    monkeypatch.setattr(watchdog, "watch", Mock(pause=slept.append))
    for name in ("abort", "_show_stacks", "_show_others"):
        monkeypatch.setattr(watchdog, name, Mock())
    for group in groups[1:]:
        watchdog._end_mismatch(group, Mismatch(3, group.rank - 1, (Facts("barrier"), Facts("all_reduce"))))
    step_s = waits.LEAD_S / 2
    assert slept == [step_s * min(before, MOST_BEFORE) for before in range(RANKS - 1)]
    assert step_s >= waits.STACK_S  # in which the first one shows where ranks are


def test_the_hooks_of_a_program_may_wait_for_the_lock(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has died. A hook waits for another thread of the program, which calls MPI."""
    monkeypatch.setattr(watchdog.survivors, "lost", lambda: (1,))
    monkeypatch.setattr(watchdog.survivors, "revoke_base", lambda: None)
    taken: list[bool] = []

    def fail(error: Exception) -> None:
        thread = threading.Thread(target=runtime.attempt, args=(5, taken.append, True))
        thread.start()
        thread.join()

    groups[0].fail = fail
    watchdog._end_lost(groups[:1])
    assert taken == [True]
    groups[0].channel.revoke.assert_called_once()
