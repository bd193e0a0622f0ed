"""The barrier that names the ranks that did not come.

[1] each other rank tells rank 0 that it has come, and waits for the answer
[2] rank 0 collects these messages until all ranks have come or the time is up
[3] rank 0 sends the list of the missing ranks, empty if there are none, to the ranks that have come
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from mpicoll._base.torch_errors import OperationTimeout
from mpicoll._base.waits import ANSWER_OF_FIRST_S
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.datatypes import spec

if TYPE_CHECKING:
    from mpicoll._faults.group_state import GroupState

ARRIVED, ANSWER = 1, 2  # tags on the group's own communicator


def monitored_barrier(group: GroupState, timeout_s: float, wait_all_ranks: bool) -> None:
    """Waits for all ranks of the group, rank 0 as long as ``timeout_s`` (collective).

    Raises:
        OperationTimeout: A rank did not come. Raised on every rank that came; names all global ranks that did not, or the first.
    """
    missing = _collect(group, timeout_s, wait_all_ranks) if group.rank == 0 else _report(group, timeout_s + ANSWER_OF_FIRST_S)
    if missing:
        ranks = ", ".join(str(group.global_ranks[rank]) for rank in missing)
        error = OperationTimeout(
            f"{group.where('monitored_barrier')}: Timed out: rank {ranks} did not come within the timeout of {timeout_s:g} s"
        )
        group.fail(error)
        raise error


def _collect(group: GroupState, timeout_s: float, wait_all_ranks: bool) -> list[int]:
    channel, deadline, backoff = group.channel, time.monotonic() + timeout_s, Backoff()
    token = torch.zeros(1, dtype=torch.uint8, device="cpu")
    with channel.lock:
        waiting = {rank: channel.comm.Irecv(spec(token.data_ptr(), 1), rank, ARRIVED) for rank in range(1, group.size)}
    arrived = []
    while waiting and time.monotonic() < deadline:
        ended = [rank for rank, request in waiting.items() if channel.test(request)]
        arrived += ended
        for rank in ended:
            del waiting[rank]
        if not ended:
            backoff.pause()
    for request in waiting.values():
        channel.cancel(request)
    missing = sorted(waiting) if wait_all_ranks else sorted(waiting)[:1]
    answer = torch.tensor(missing + [-1] * (group.size - len(missing)), dtype=torch.int64, device="cpu")
    with channel.lock:
        answers = [channel.comm.Isend(spec(answer.data_ptr(), answer.nbytes), rank, ANSWER) for rank in arrived]
    channel.wait_all(answers)
    return missing


def _report(group: GroupState, timeout_s: float) -> list[int]:
    channel, deadline, backoff = group.channel, time.monotonic() + timeout_s, Backoff()
    token, answer = torch.zeros(1, dtype=torch.uint8, device="cpu"), torch.empty(group.size, dtype=torch.int64, device="cpu")
    with channel.lock:
        sent = channel.comm.Isend(spec(token.data_ptr(), 1), 0, ARRIVED)
        request = channel.comm.Irecv(spec(answer.data_ptr(), answer.nbytes), 0, ANSWER)
    while not channel.test(request):
        if time.monotonic() > deadline:
            channel.cancel(request)
            return [0]
        backoff.pause()
    channel.wait_all([sent])
    return [rank for rank in answer.tolist() if rank >= 0]
