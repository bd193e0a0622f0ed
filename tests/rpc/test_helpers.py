"""mpicoll.rpc.api's helpers, which libraries use: who takes part, barriers, all_gather, debug info, leaks, worlds of one."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from mpicoll import autograd, rpc
from mpicoll.rpc import api
from tests.support import agree, everyone


def add(a: int, b: int) -> int:
    return a + b


def test_the_current_agent(workers: list[str], rank: int, size: int) -> None:
    agent = rpc._get_current_rpc_agent()
    infos = agent.get_worker_infos()
    agree([(info.name, info.id) for info in infos] == [(name, i) for i, name in enumerate(workers)], infos)
    assert agent.get_worker_info() == rpc.get_worker_info()
    assert agent.get_worker_info(workers[0]) == agent.get_worker_info(0) == infos[0]
    numbers = rpc._get_debug_info()
    expected = rpc._rref_context_get_debug_info().keys() | agent.get_debug_info().keys() | autograd._get_debug_info().keys()
    agree(numbers.keys() == expected, numbers)


@pytest.mark.min_ranks(2)
def test_all_gather_with_a_worker_that_is_late(workers: list[str], rank: int, size: int) -> None:
    """It raises on every worker. (It returned what was there: without the late one's object, or nothing.)"""
    everyone(None)
    if rank == 1:
        time.sleep(1.0)
    late = "worker1" if rank == 0 else "worker0"
    with pytest.raises(RuntimeError, match=rf"nothing has come from workers \['{late}'\] within 0.30 seconds"):
        api._all_gather(rank, timeout=0.3)
    everyone(None)
    found = api._all_gather(rank)
    agree(found == {name: i for i, name in enumerate(workers)}, found)


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


class Foreign(rpc.RpcBackendOptions):
    """Options of another backend."""


def test_options_of_another_backend() -> None:
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        rpc.init_rpc("me", rpc_backend_options=Foreign())
    with pytest.raises(TypeError, match="`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"):
        rpc.init_rpc("me", backend=rpc.BackendType.TENSORPIPE, rpc_backend_options=Foreign())
    with pytest.raises(TypeError, match="rpc_timeout must be a number of seconds"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=timedelta(seconds=3))  # type: ignore[arg-type]
    agree(True)


@pytest.mark.min_ranks(2)
def test_leaks(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody deletes the references of this worker, their owner raises, if it is asked to; RPC has ended all the same."""
    for ignore in (True, False):
        rpc.init_rpc(f"worker{rank}")
        rref = rpc.remote((rank + 1) % size, list)
        rref.to_here()
        everyone(None)
        with monkeypatch.context() as patched:
            patched.setattr(api, "_ignore_rref_leak", ignore)
            patched.setattr(api, "_delete_all_user_and_unforked_owner_rrefs", lambda: None)
            if ignore:
                rpc.shutdown()
            else:
                with pytest.raises(RuntimeError, match=r"Leaking RRef GloballyUniqueId\(created_on="):
                    rpc.shutdown()
        assert not rpc._is_current_rpc_agent_set()
        del rref
    agree(True)


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
