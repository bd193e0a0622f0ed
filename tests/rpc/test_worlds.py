"""An RPC world from init_rpc to shutdown: who takes part, who leaves, what is left (traps 86, 91)."""

import re
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll
from mpicoll import rpc
from mpicoll.rpc import api
from mpicoll.rpc.agent import Agent
from mpicoll.rpc.futures import PendingCall, PendingCalls
from mpicoll.rpc.options import DeviceMaps
from mpicoll.rpc.workers import Workers, this_process
from tests.rpc.test_calls import add, nap, who
from tests.support import agree, everyone, raised_by


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
    for made in (rpc.MPIRpcBackendOptions, rpc.TensorPipeRpcBackendOptions):
        options = made(num_worker_threads=3, rpc_timeout=0.2, init_method="env://", device_maps={}, devices=[])
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
        with pytest.raises(RuntimeError, match="200 ms"):
            rpc.rpc_sync((rank + 1) % size, nap, (0.5,))
        everyone(None)
        rpc.shutdown()
    make: Any = rpc.TensorPipeRpcBackendOptions
    foreign, over_tensorpipe = Foreign(), {"backend": rpc.BackendType.TENSORPIPE}
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "num_worker_threads must be positive", lambda: make(num_worker_threads=0)),
        (ValueError, "RPC Timeout must be non-negative", lambda: make(rpc_timeout=-1)),
        (TypeError, "rpc_timeout must be a number of seconds", lambda: make(rpc_timeout=timedelta(seconds=3))),
        (ValueError, "1-to-1", lambda: make(device_maps={"a": {0: 1, 1: 1}})),
        (TypeError, "Could not infer backend", lambda: rpc.init_rpc("me", rpc_backend_options=foreign)),
        (
            TypeError, "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`",
            lambda: rpc.init_rpc("me", rpc_backend_options=foreign, **over_tensorpipe),
        ),
    ]  # fmt: skip
    for kind, words, call in refused:
        with pytest.raises(kind, match=words):
            call()
    agree(True)


class Foreign(rpc.RpcBackendOptions):
    """Options of another backend."""


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


@pytest.mark.min_ranks(2)
def test_a_worker_that_has_left(rank: int, size: int) -> None:
    """shutdown(graceful=False): calls to it that wait fail, later ones at once, with its name; the others go on."""
    rpc.init_rpc(f"worker{rank}")
    leaver = size - 1
    if rank == leaver:
        everyone(None)
        rpc.shutdown(graceful=False)
        everyone(None)
    else:
        waiting = rpc.rpc_async(leaver, nap, (30,))
        everyone(None)
        calls = (waiting.wait, lambda: rpc.rpc_sync(leaver, who), lambda: rpc.remote(leaver, who))
        said = [raised_by(call) for call in calls]
        good = rpc.rpc_sync(rank, who) == f"worker{rank}"
        everyone(None)
        rpc.shutdown()
        assert good
        assert all(isinstance(error, mpicoll.WorkerLeft) and f"worker{leaver}" in str(error) for error in said), said
    agree(True)


@pytest.mark.min_ranks(2)
def test_shutdown_with_a_time_limit(rank: int, size: int) -> None:
    """Who has not come is named; RPC has ended nevertheless, and can begin anew."""
    rpc.init_rpc(f"worker{rank}")
    everyone(None)  # init_rpc may return later on one rank, which would be late, too
    late = size - 1
    if rank == late:
        everyone(None)
        rpc.shutdown(graceful=False)
    else:
        expected = rf"not every worker has come to its shutdown within 0.3 s: 'worker{late}' \(rank {late}\)"
        with pytest.raises(RuntimeError, match=expected):
            rpc.shutdown(timeout=0.3)
        everyone(None)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        rpc.rpc_sync("worker0", who)
    agree(True)


_may_end = threading.Event()


def wait_for_the_test() -> None:
    _may_end.wait(50)


@pytest.mark.min_ranks(2)
def test_shutdown_while_a_call_is_under_way(rank: int, size: int) -> None:
    """Within its time limit it waits for the call; past that, it says so, and the call fails.

    The first rank whose limit has passed leaves. The others may notice this before their own limits have passed.
    """
    rpc.init_rpc(f"worker{rank}")
    future = rpc.rpc_async((rank + 1) % size, wait_for_the_test)
    everyone(None)
    error = raised_by(lambda: rpc.shutdown(timeout=0.3))
    assert error is None or re.search("under way|has come to its shutdown", str(error)), error
    assert any(everyone(error is not None))
    with pytest.raises(mpicoll.WorkerLeft, match=r"wait_for_the_test|left"):
        future.wait()
    _may_end.set()
    everyone(None)
    agree(True)


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


def wakes() -> int:
    """How often the threads of RPC of this process have slept."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name.startswith("mpicoll rpc")]
    status = [Path(f"/proc/self/task/{number}/status").read_text() for number in threads]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in status)


def test_an_idle_agent_costs_little(workers: list[str]) -> None:
    """A second after the last call, its threads wake up at most 100 times a second. What a wake costs is the machine's affair.

    In the least of three seconds: in the last one ranks that have come to `agree` wait for this one, which then stays awake.
    """
    time.sleep(1.2)
    woken = []
    for _ in range(3):
        before = wakes()
        time.sleep(1.0)
        woken.append(wakes() - before)
    agree(min(woken) <= 100, woken)


def test_threads_do_not_pile_up(right: str) -> None:
    """Many calls at once make threads; afterwards only some are kept."""
    for future in [rpc.rpc_async(right, nap, (0.05,)) for _ in range(60)]:
        future.wait()
    agent = Agent.get()
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
        agent = Agent.get()
        mine = this_process("here")
        agent.workers._processes = [mine, mine._replace(pid=child.pid)]
        with pytest.raises(mpicoll.WorkerLeft) as raised:
            rpc.rpc_sync("worker1", time.sleep, (5,), timeout=0)
        said = str(raised.value)
    everyone(None)
    rpc.shutdown(graceful=False)
    expected = r"worker 'worker1' \(rank 1\) has left before it answered sleep: its process \d+ on host here has ended"
    agree(rank > 0 or re.fullmatch(expected, said), said)


@pytest.mark.parametrize("made", ["of a communicator", "again"])
def test_shutdown_after_the_world_has_gone(made: str, no_world: None, rank: int, size: int) -> None:
    """It freed the communicator of the world a second time."""
    if made == "again":
        mpicoll.init_process_group()
        handles: list[str] = [""] * size
        mpicoll.all_gather_object(handles, mpicoll.get_reconfigure_handle())
        mpicoll.reconfigure(7_353, handles)
    else:
        comm = MPI.COMM_WORLD.Split(0, -rank)
        mpicoll.init_process_group(comm=comm)
        comm.Free()
    place = mpicoll.get_rank()
    rpc.init_rpc(f"worker{place}")
    found = rpc.rpc_sync(f"worker{(place + 1) % size}", torch.add, (torch.ones(1), place))
    mpicoll.barrier()
    mpicoll.destroy_process_group()
    rpc.shutdown()
    agree(found.item() == place + 1, found)


@pytest.mark.min_ranks(2)
def test_errors_during_shutdown_are_raised(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> None:
        raise RuntimeError("simulation")

    rpc.init_rpc(f"worker{rank}")
    if rank > 0:
        monkeypatch.setattr(api, "_delete_all_user_and_unforked_owner_rrefs", failing)
        with pytest.raises(RuntimeError, match="simulation"):
            rpc.shutdown()
    else:
        rpc.shutdown()
    assert not rpc._is_current_rpc_agent_set()
    agree(True)


def test_no_thread_is_left(rank: int, size: int) -> None:
    before = set(threading.enumerate())
    rpc.init_rpc(f"worker{rank}")
    called = rpc.rpc_sync((rank + 1) % size, who) == f"worker{(rank + 1) % size}"
    everyone(None)
    rpc.shutdown()
    left = []
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)  # those of the pool end by themselves, after the call to which they belong
        left += [thread.name] * thread.is_alive()
    agree(called and not left, f"{called} {left}")


def test_a_world_of_one(rank: int, size: int) -> None:
    """Each rank by itself, as often as it likes: nobody waits for another, and names need not differ."""
    for turn in range(rank + 1):
        rpc.init_rpc("me", rank=0, world_size=1)
        rref = rpc.remote("me", add, (turn, 1))
        found = rref.to_here(), rpc.rpc_sync(0, add, (2, 2)), len(rpc._get_current_rpc_agent().get_worker_infos())
        assert found == (turn + 1, 4, 1)
        with pytest.raises(RuntimeError, match="could not find destination"):
            rpc.rpc_sync(1, add, (1, 1))
        rpc.shutdown()
    if size > 1 and rank > 0:
        with pytest.raises(ValueError, match=f"rank=1, but MPI says {rank}|world_size=1, but MPI says"):
            rpc.init_rpc("me", rank=1, world_size=1)
    rpc.init_rpc(f"worker{rank}")
    answer = rpc.rpc_sync((rank + 1) % size, add, (1, 1))
    rpc.shutdown()
    agree(answer == 2)


# -- device maps: a call goes by the caller's, its answer by the same one the other way round


def cuda(*pairs: tuple[int, int]) -> dict[torch.device, torch.device]:
    return {torch.device("cuda", here): torch.device("cuda", there) for here, there in pairs}


def test_the_callers_map_serves_both_ways() -> None:
    """If both have one, each one's own is for its own calls."""
    everybody = {"a": {"b": cuda((0, 1))}, "b": {}}
    a, b = DeviceMaps("a", everybody), DeviceMaps("b", everybody)
    assert a.to("b", answer=False) == cuda((0, 1))
    assert b.to("a", answer=True) == b.to("a", answer=False) == cuda((1, 0))
    assert a.to("a", answer=False) == {}
    everybody = {"a": {"b": cuda((0, 1))}, "b": {"a": cuda((1, 1), (0, 0))}}
    b = DeviceMaps("b", everybody)
    assert b.to("a", answer=False) == cuda((1, 1), (0, 0))
    assert b.to("a", answer=True) == cuda((1, 0), (0, 0))


def test_a_map_for_nobody(rank: int, size: int) -> None:
    """Named on all ranks, whoever has it."""
    options = rpc.MPIRpcBackendOptions(device_maps={"nobody": {0: 0}} if rank == size - 1 else {})
    with pytest.raises(
        ValueError, match=rf"Node worker{size - 1} has invalid target node names in its device maps: 'nobody'; the"
    ):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    rpc.shutdown()
    agree(True)


# -- pending calls, and what is known of a callee's process


def test_which_calls_expire() -> None:
    """Those whose time is up: neither one without a limit, nor one that has been answered."""
    workers = Workers(["a", "b"], [this_process("here")] * 2, 0)
    calls = PendingCalls(workers)
    futures = [PendingCall(lambda future: None, workers.all[0], "f", limit) for limit in (1e-3, 60.0, 0.0, 1e-3)]
    numbers = [calls.add(future) for future in futures]
    calls.take(numbers[3])
    time.sleep(0.01)
    for _ in range(2):
        calls.expire(lambda run: run())
    assert [future.done() for future in futures] == [True, False, False, False]
    assert len(calls) == 2


def test_what_is_known_of_a_process() -> None:
    """Its state, if it is on the node of this one."""
    mine = this_process("one")
    assert Workers(["a"], [mine], 0).process(0) == f"its process {mine.pid} on host one runs"
    there = mine._replace(hostname="two", node=("two",))
    workers = Workers(["a", "b"], [mine, there], 0)
    assert workers.process(1) == f"its process {mine.pid} on host two cannot be seen from this node"
    assert not any(workers.has_ended(rank) for rank in range(2))
