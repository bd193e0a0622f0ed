"""Groups made by torch's new_group on an mpi world: members, order, other backends beside it, a new world after the old."""

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import mpicoll
from mpicoll._api import groups
from mpicoll._base.errors import LaunchError
from mpicoll._base.launcher import started_by_mpi
from mpicoll._c10d import names
from mpicoll._engine.registry import registry
from mpicoll._mpi import abort
from tests.support import agree, everyone, free_port

pytestmark = pytest.mark.usefixtures("world")


def total(group: object = None) -> float:
    """The sum of global ranks + 1 over the group's members."""
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)  # type: ignore[arg-type]
    return float(tensor)


def test_the_world(rank: int, size: int) -> None:
    """trap 60."""
    agree(
        (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "mpi")
        and dist.get_backend_config() == ",".join(f"{device}:mpi" for device in names.devices())
        and dist.is_mpi_available() is started_by_mpi()
        and dist.group.WORLD._get_backend(torch.device("cpu")).name() == "mpi"  # type: ignore[union-attr]
        and dist.distributed_c10d._get_object_coll_device() == "cpu"
        and dist.get_process_group_ranks(None) == list(range(size)),
        (dist.get_rank(), dist.get_backend(), dist.get_backend_config()),
    )


def test_groups_of_members_only_come_and_go(no_world: None, rank: int, size: int) -> None:
    """torch <= 2.13 names such a group by how many there are: after the first of two was destroyed, by the second one's name.

    torch 2.15 counts them on members, and then calls the world's next group otherwise there: its Gloo would not meet.
    """
    dist.init_process_group("mpi")
    ranks = list(range(max(1, size - 1)))
    right = True
    if rank in ranks:
        first, second = (dist.new_group(ranks, use_local_synchronization=True) for _ in range(2))
        dist.destroy_process_group(first)
        third = dist.new_group(ranks, use_local_synchronization=True)
        right = total(second) == total(third) == sum(r + 1.0 for r in ranks)
    agree(right and total(dist.new_group(backend="gloo")) == size * (size + 1) / 2)


def test_init_barrier_needs_the_store(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """trap 49."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    group = dist.new_group()
    right = total(group) == size * (size + 1) / 2
    dist.destroy_process_group(group)
    agree(right)


def test_a_new_world_after_the_old(no_world: None, rank: int, size: int) -> None:
    """trap 53; groups that were left open end with their world."""
    seen = []
    for backend in ("mpi", "MPI", "mpicoll", "cpu:mpi", "cpu:mpi,cuda:mpi"):
        dist.init_process_group(backend)
        dist.new_group(list(range(size)))
        seen.append((str(dist.get_backend()), total()))
        dist.destroy_process_group()
        assert not registry._groups
    names = [name for name, _ in seen]
    expected = ["mpi", "mpi", "mpicoll", "cpu:mpi", "cpu:mpi,cuda:mpi"]
    agree(names == expected and all(t == size * (size + 1) / 2 for _, t in seen), seen)


@pytest.mark.parametrize("method", ["env://", "mpi://", "tcp", "file", "store"])
def test_init_methods(method: str, no_world: None, rank: int, size: int, shared_path: object) -> None:
    if method == "store":
        store = dist.FileStore(f"{shared_path}/store", size)
        dist.init_process_group("mpi", store=store, timeout=timedelta(seconds=40))
    elif method == "file":
        dist.init_process_group("mpi", init_method=f"file://{shared_path}/rendezvous")
    elif method == "tcp":
        port = everyone(free_port())[0]
        dist.init_process_group("mpi", init_method=f"tcp://127.0.0.1:{port}")
    else:
        dist.init_process_group("mpi", init_method=method)
    default = registry.find(c10d._get_process_group_name(dist.group.WORLD))  # type: ignore[arg-type]
    seconds = default.timeout_s if default else None
    gloo = dist.new_group(backend="gloo")
    got = (dist.get_rank(), dist.get_world_size(), total(), total(gloo), seconds)
    half = size * (size + 1) / 2
    agree(got == (rank, size, half, half, 40 if method == "store" else 1800), got)


@pytest.mark.parametrize("backend", ["gloo", None], ids=str)
def test_other_backends_by_our_rendezvous(backend: str | None, no_world: None, rank: int, size: int) -> None:
    """init_method="mpi://" serves any backend, and mpi subgroups work in a gloo world."""
    dist.init_process_group(backend, init_method="mpi://")
    ours = dist.new_group(backend="mpi")
    got = (dist.get_rank(), dist.get_world_size(), total(), dist.get_backend(ours), total(ours))
    half = size * (size + 1) / 2
    agree(got == (rank, size, half, "mpi", half), got)


@pytest.mark.min_ranks(2)
def test_mpi_group_in_a_world_with_other_ranks(no_world: None, rank: int, size: int, shared_path: object) -> None:
    store = dist.FileStore(f"{shared_path}/store", size)
    dist.init_process_group("gloo", store=store, rank=size - 1 - rank, world_size=size)
    if rank != size - 1 - rank:
        with pytest.raises(RuntimeError, match="in MPI"):
            dist.new_group([0], backend="mpi")
    else:
        dist.new_group([0], backend="mpi")  # not a member
    agree(True)


@pytest.mark.min_ranks(3)
def test_mpi_cannot_start_on_some_ranks_only(no_world: None, rank: int, size: int, shared_path: object) -> None:
    store = dist.FileStore(f"{shared_path}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if rank < 2:
        with pytest.raises(RuntimeError, match="not running yet"):
            dist.new_group([0, 1], backend="mpi", use_local_synchronization=True)
    agree(True)


@pytest.mark.min_ranks(2)
def test_stale_variables_warn_and_mpi_wins(no_world: None, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """trap 77."""
    monkeypatch.setenv("RANK", str(rank + 1))
    monkeypatch.setenv("WORLD_SIZE", str(size + 5))
    with pytest.warns(UserWarning, match="MPI says") as caught:
        dist.init_process_group("mpi", rank=rank + 1, world_size=size + 5)
    texts = [str(w.message) for w in caught if "MPI" in str(w.message)]
    agree(
        (dist.get_rank(), dist.get_world_size()) == (rank, size)
        and any(f"RANK={rank + 1}" in text for text in texts)
        and any(f"WORLD_SIZE={size + 5}" in text for text in texts)
        and caught[0].filename == __file__,
        texts,
    )


def test_a_failed_init_can_be_repeated(no_world: None, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left half-made, whether torch fails before or after it has asked us for a group."""
    with pytest.raises(TypeError):
        dist.init_process_group("mpi", timeout=5)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(c10d, "_register_pg_in_world", _breaks) if hasattr(c10d, "_register_pg_in_world") else None
        patch.setattr(c10d, "_update_default_pg", _breaks)
        with pytest.raises(ZeroDivisionError):
            dist.init_process_group("mpi")
    left = (dist.is_initialized(), dict(registry._groups), dict(c10d._world.pg_map), c10d._world.group_count)
    dist.init_process_group("mpi")
    agree(left == (False, {}, {}, 0) and total() == size * (size + 1) / 2, left)


@pytest.mark.parametrize("breaking", ["_register_pg_in_world", "_is_barrier_after_init"])
def test_a_failed_new_group_can_be_repeated(breaking: str, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after torch has entered the group in its tables."""
    state = (len(c10d._world.pg_names), len(c10d._world.pg_map), c10d._world.group_count, len(registry._groups))
    with monkeypatch.context() as patch:
        patch.setattr(c10d, breaking, _breaks, raising=False)
        try:
            group = dist.new_group()  # torch 2.11 has no _register_pg_in_world
        except ZeroDivisionError:
            after = (len(c10d._world.pg_names), len(c10d._world.pg_map), c10d._world.group_count, len(registry._groups))
            assert after == state
        else:
            dist.destroy_process_group(group)
    group = dist.new_group()
    right = total(group) == size * (size + 1) / 2
    dist.destroy_process_group(group)
    agree(right)


def test_the_excepthook_comes_back(no_world: None) -> None:
    """With the last of two worlds, though torch has set a hook of its own for each. One that the program has set stays."""
    before = sys.excepthook
    for backend in ("gloo", "mpi"):
        dist.init_process_group(backend, init_method="mpi://")
        agree(sys.excepthook != before)  # and a rank of Gloo that leaves breaks what the others begin
        dist.destroy_process_group()
    after = sys.excepthook
    dist.init_process_group("mpi")
    inside, sys.excepthook = sys.excepthook, sys.__excepthook__
    dist.destroy_process_group()
    kept, sys.excepthook = sys.excepthook, inside
    uninstalled = abort.uninstall()
    agree(after is before and kept is sys.__excepthook__ and uninstalled and sys.excepthook is before)


def test_variables_are_there_afterwards(no_world: None, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("mpi")
    got = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    agree(got[1] > 0 and got[0], got)


def test_abort_does_not_wait(rank: int, size: int) -> None:
    group = dist.new_group()
    c10d._abort_process_group(group)
    with pytest.raises(RuntimeError, match="group"):
        group.allreduce([torch.ones(1)]).wait()
    agree(total() == size * (size + 1) / 2)


def _breaks(*args: object, **kwargs: object) -> None:
    raise ZeroDivisionError


def test_a_group_by_the_helper_of_torch(rank: int, size: int) -> None:
    """Libraries of reinforcement learning do so. It raised NameError: name 'ProcessGroupMPI' is not defined."""
    backend, limit = c10d.Backend("mpi"), timedelta(seconds=30)
    store = c10d.PrefixStore("of a library", c10d._get_default_store())
    group, _ = c10d._new_process_group_helper(size, rank, [], backend, store, group_name="library", timeout=limit)
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    good = dist.get_backend(group) == "mpi" and total(group) == size * (size + 1) / 2
    dist.destroy_process_group(group)
    with pytest.raises(LaunchError, match=rf"rank {rank} of {size + 1}, but this is rank {rank} of {size} in MPI.*new_group"):
        c10d._new_process_group_helper(size + 1, rank, [], backend, store, group_name="larger", timeout=limit)
    agree(good)


def test_the_settings_of_one_group(no_world: None, rank: int, size: int) -> None:
    dist.init_process_group("mpi", pg_options={"MPICOLL_ON_TIMEOUT": "raise"})
    plain, own = dist.new_group(), dist.new_group(pg_options={"MPICOLL_ON_TIMEOUT": "raise"})
    assert [made.raises for made in map(groups.of, (None, plain, own)) if made is not None] == [True, False, True]
    with pytest.raises(ValueError, match=r"can set MPICOLL_ON_TIMEOUT only, got \{'MPICOLL_TIMEOUT': '3'\}"):
        dist.new_group(pg_options={"MPICOLL_TIMEOUT": "3"})
    with pytest.raises(ValueError, match="MPICOLL_ON_TIMEOUT='stop' is not allowed; use one of end, raise"):
        dist.new_group(pg_options={"MPICOLL_ON_TIMEOUT": "stop"})
    values = torch.full((3,), rank + 1.0)
    dist.all_reduce(values, group=own)
    assert values.tolist() == [size * (size + 1) / 2] * 3


def test_a_split_group_takes_the_options_of_a_group(size: int) -> None:
    """split_group did not pass them on."""
    for value in ("raise", "end"):
        part = mpicoll.split_group(split_ranks=[list(range(size))], pg_options={"MPICOLL_ON_TIMEOUT": value})
        assert part is not None
        communicator = registry.find(part.group_name)
        assert communicator is not None
        agree(communicator.raises == (value == "raise"))
    with pytest.raises(ValueError, match="pg_options of a group over mpi can set MPICOLL_ON_TIMEOUT only"):
        mpicoll.split_group(split_ranks=[list(range(size))], pg_options={"MPICOLL_CHECK": "1"})
    everyone(None)
