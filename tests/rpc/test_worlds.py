"""An RPC world from init_rpc to shutdown: who takes part, who leaves, what is left (traps 86, 91)."""

from __future__ import annotations

import re
import subprocess
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

import mpicoll
from mpicoll import rpc
from mpicoll.rpc import current_agent
from mpicoll.rpc.workers import this_process
from tests.rpc.test_calls import add, nap, who
from tests.support import agree, everyone


def test_names_and_numbers_are_checked(rank: int, size: int) -> None:
    """On every rank, before anybody waits for anybody."""
    if size > 1:
        with pytest.raises(ValueError, match=f"rank={size}, but MPI says {rank}"):
            rpc.init_rpc("a", rank=size)
        with pytest.raises(ValueError, match="world_size"):
            rpc.init_rpc("a", world_size=size + 1)
    with pytest.raises(TypeError, match="options"):
        rpc.init_rpc("a", rpc_backend_options=3)  # type: ignore[arg-type]
    if size > 1:
        with pytest.raises(RuntimeError, match=r"'twin' is not unique"):
            rpc.init_rpc("twin" if rank < 2 else f"other{rank}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    rpc.shutdown()
    agree(True)


def test_options(rank: int, size: int) -> None:
    """torch's keywords, for ours and for TensorPipe's."""
    for kind in (rpc.MPIRpcBackendOptions, rpc.TensorPipeRpcBackendOptions):
        options = kind(num_worker_threads=3, rpc_timeout=0.2, init_method="env://", device_maps={}, devices=[])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        with pytest.raises(RuntimeError, match="200 ms"):
            rpc.rpc_sync((rank + 1) % size, nap, (0.5,))
        everyone(None)
        rpc.shutdown()
    for keywords in ({"num_worker_threads": 0}, {"rpc_timeout": -1}, {"device_maps": {"a": {0: 1, 1: 1}}}):
        with pytest.raises(ValueError, match=r"num_worker_threads must be positive|RPC Timeout must be non-negative|1-to-1"):
            rpc.MPIRpcBackendOptions(**keywords)  # type: ignore[arg-type]
    agree(True)


def forward(names: list[str], depth: int) -> None:
    _seen.append(depth)
    if depth:
        rpc.rpc_async(names[depth % len(names)], forward, (names, depth - 1))


_seen: list[int] = []


def test_shutdown_waits_for_what_calls_cause(rank: int, size: int) -> None:
    """A chain of calls that nobody waits for, begun just before (trap 91)."""
    _seen.clear()
    everyone(None)
    rpc.init_rpc(f"worker{rank}")
    names = [f"worker{r}" for r in range(size)]
    if rank == 0:
        forward(names, 60)
    rpc.shutdown()
    total = sum(everyone(len(_seen)))
    agree(total == 61, total)


def test_a_rank_that_comes_late(rank: int, size: int) -> None:
    """It is served, and serves, until it comes to its shutdown."""
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        time.sleep(0.5)
        answers = [rpc.rpc_sync(r, who) for r in range(size)]
    else:
        answers = [f"worker{r}" for r in range(size)]
    rpc.shutdown()
    agree(answers == [f"worker{r}" for r in range(size)], answers)


@pytest.mark.min_ranks(2)
def test_a_worker_that_has_left(rank: int, size: int) -> None:
    """shutdown(graceful=False): calls to it that wait fail, later ones at once, with its name; the others go on."""
    rpc.init_rpc(f"worker{rank}")
    leaver, said = size - 1, []
    if rank == leaver:
        everyone(None)
        rpc.shutdown(graceful=False)
        everyone(None)
    else:
        waiting = rpc.rpc_async(leaver, nap, (30,))
        everyone(None)
        for call in (waiting.wait, lambda: rpc.rpc_sync(leaver, who), lambda: rpc.remote(leaver, who)):
            try:
                call()
            except mpicoll.WorkerLeft as error:
                said.append(str(error))
        good = rpc.rpc_sync(rank, who) == f"worker{rank}"
        everyone(None)
        rpc.shutdown()
        assert good
        assert len(said) == 3, said
        assert all(f"worker{leaver}" in text for text in said), said
    agree(True)


@pytest.mark.min_ranks(2)
def test_shutdown_with_a_time_limit(rank: int, size: int) -> None:
    """Who has not come is named; RPC has ended nevertheless, and can begin anew."""
    rpc.init_rpc(f"worker{rank}")
    late, said = size - 1, ""
    if rank == late:
        everyone(None)
        rpc.shutdown(graceful=False)
    else:
        try:
            rpc.shutdown(timeout=0.3)
        except RuntimeError as error:
            said = str(error)
        everyone(None)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        rpc.rpc_sync("worker0", who)
    expected = f"not every worker has come to its shutdown within 0.3 s: 'worker{late}' (rank {late})"
    agree(rank == late or expected in said, said)


@pytest.mark.min_ranks(2)
def test_shutdown_while_a_call_is_under_way(rank: int, size: int) -> None:
    """Within its time limit it waits for the call; past that, it says so, and the call fails."""
    rpc.init_rpc(f"worker{rank}")
    said, future = "", rpc.rpc_async((rank + 1) % size, nap, (1.5,))
    everyone(None)
    try:
        rpc.shutdown(timeout=0.3)
    except RuntimeError as error:
        said = str(error)
    with pytest.raises(mpicoll.WorkerLeft, match=r"nap|left"):
        future.wait()
    everyone(None)
    agree("under way" in said or "has come to its shutdown" in said, said)


@pytest.mark.min_ranks(3)
def test_the_others_wait_for_each_other(rank: int, size: int) -> None:
    """When a worker has left, graceful still means that who comes first serves until the last has come."""
    rpc.init_rpc(f"worker{rank}")
    answers = [f"worker{r}" for r in range(size - 1)]
    if rank == size - 1:
        rpc.shutdown(graceful=False)
    elif rank == 0:
        time.sleep(0.5)
        answers = [rpc.rpc_sync(r, who) for r in range(size - 1)]
    if rank < size - 1:
        rpc.shutdown()
    agree(answers == [f"worker{r}" for r in range(size - 1)], answers)


def test_without_and_beside_a_process_group(right: str, rank: int, size: int) -> None:
    """Collectives and calls, in both orders of initialisation; RPC outlives the group."""
    began = not mpicoll.is_initialized()
    if began:
        mpicoll.init_process_group(timeout=timedelta(seconds=50))
    total = torch.ones(1)
    work: Any = mpicoll.all_reduce(total, async_op=True)
    answer = rpc.rpc_sync(right, add, (total.new_ones(2), 1))
    work.wait()
    mpicoll.destroy_process_group()
    agree(total.item() == size and answer.tolist() == [2, 2] and rpc.rpc_sync(right, add, (1, 1)) == 2, (total, answer))


def test_an_idle_agent_costs_little(workers: list[str]) -> None:
    """Less than 2 % of a core, a second after the last call."""
    time.sleep(1.2)
    before, began = time.process_time(), time.monotonic()
    time.sleep(1.0)
    share = (time.process_time() - before) / (time.monotonic() - began)
    agree(share < 0.02, share)


def test_threads_do_not_pile_up(right: str) -> None:
    """Many calls at once make threads; afterwards only some are kept."""
    for future in [rpc.rpc_async(right, nap, (0.05,)) for _ in range(60)]:
        future.wait()
    agent = current_agent.get()
    deadline = time.monotonic() + 10
    while agent.pool.threads > agent.options.num_worker_threads + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    agree(agent.pool.threads <= agent.options.num_worker_threads + 1, agent.pool.threads)


@pytest.mark.min_ranks(2)
def test_a_callee_whose_process_has_ended(rank: int, size: int) -> None:
    """Not every launcher ends the job then. The call has no timeout; the callee's process is that of a child here."""
    rpc.init_rpc(f"worker{rank}")
    said = ""
    if rank == 0:
        child = subprocess.Popen(["true"])
        child.wait()
        agent = current_agent.get()
        mine = this_process("here")
        agent.workers._processes = {0: mine, 1: mine._replace(pid=child.pid)}
        with pytest.raises(mpicoll.WorkerLeft) as raised:
            rpc.rpc_sync("worker1", time.sleep, (5,), timeout=0)
        said = str(raised.value)
    everyone(None)
    rpc.shutdown(graceful=False)
    expected = r"worker 'worker1' \(rank 1\) has left before it answered sleep: its process \d+ on host here has ended"
    agree(rank > 0 or re.fullmatch(expected, said), said)
