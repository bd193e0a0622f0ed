"""The ranks of a group meet before they go on, and those that do not come are named.

[1] each other rank sends its value to rank 0, and waits for the answer
[2] rank 0 collects the values until all have come or the time is up
[3] rank 0 answers who is missing, and what it finds in the values; all ranks then go on, or raise the same error
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpicoll._base import last_words
from mpicoll._base.torch_errors import OperationTimeout
from mpicoll._base.waits import ANSWER_OF_FIRST_S
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.datatypes import BYTE

if TYPE_CHECKING:
    from mpicoll._engine.group import Group
    from mpicoll._mpi.library import MPI

VALUE, ANSWER = 1, 2  # tags on the group's own communicator


def meet(
    group: Group,
    operation: str,
    value: Any,
    limit_s: float,
    judge: Callable[[dict[int, Any]], Any] = bool,
    all_named: bool = True,
) -> Any:
    """Returns on all ranks what ``judge`` finds in the ranks' values, on rank 0 (collective).

    Raises:
        OperationTimeout: A rank did not come. Raised on every rank that came; names all global ranks that did not, or the first.
    """
    if group.rank == 0:
        missing, found = _collect(group, value, limit_s, judge)
    else:
        missing, found = _report(group, value, limit_s + ANSWER_OF_FIRST_S)
    if missing:
        ranks = [group.global_ranks[rank] for rank in (missing if all_named else missing[:1])]
        error = OperationTimeout(f"{group.where(operation)}: Timed out: {last_words.late(ranks, limit_s)}")
        group.fail(error)
        raise error
    return found


def _collect(group: Group, value: Any, limit_s: float, judge: Callable[[dict[int, Any]], Any]) -> tuple[list[int], Any]:
    deadline, backoff = time.monotonic() + limit_s, Backoff()
    known, waiting = {0: value}, set(range(1, group.size))
    while waiting and time.monotonic() < deadline:
        for rank in list(waiting):
            if (content := _receive(group, rank, VALUE)) is not None:
                known[rank] = pickle.loads(content)
                waiting.remove(rank)
                backoff.reset()
        backoff.pause()
    missing = sorted(waiting)
    found = None if missing else judge(known)
    answer = pickle.dumps((missing, found))
    group.channel.wait_all([_send(group, answer, rank, ANSWER) for rank in known if rank != 0])
    return missing, found


def _report(group: Group, value: Any, limit_s: float) -> tuple[list[int], Any]:
    deadline, backoff = time.monotonic() + limit_s, Backoff()
    sent = _send(group, pickle.dumps(value), 0, VALUE)
    while (content := _receive(group, 0, ANSWER)) is None:
        if time.monotonic() > deadline:
            return [0], None
        backoff.pause()
    group.channel.wait_all([sent])
    missing, found = pickle.loads(content)
    return missing, found


def _send(group: Group, content: bytes, rank: int, tag: int) -> MPI.Request:
    with group.channel.lock:
        return group.channel.comm.Isend([content, len(content), BYTE], rank, tag)


def _receive(group: Group, rank: int, tag: int) -> bytearray | None:
    """Returns what this rank has sent; None if it has not come."""
    arrived = group.channel.arrived(rank, tag)
    if arrived is None:
        return None
    content = bytearray(arrived.nbytes)
    with group.channel.lock:
        request = group.channel.comm.Irecv([content, arrived.nbytes, BYTE], rank, tag)
    group.channel.wait_all([request])
    return content
