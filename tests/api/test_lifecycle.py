"""The world and its groups: made, used, destroyed, made again; nothing collective that not all members call."""

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll as dist
from mpicoll._engine.registry import registry
from mpicoll._faults import inquiries
from mpicoll._faults.under_way import table
from tests.support import agree, raised_by

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


def summed(group: Any = None, value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


# -- the world ---------------------------------------------------------------------------------------------------------


def test_a_group_of_an_earlier_world_is_not_taken_for_its_namesake(no_world: None) -> None:
    """The program keeps the first one. (A rank of another node was told its calls, and ended the job: they differed.)"""
    begun = []
    for calls in (1, 0):
        dist.init_process_group()
        group = dist.new_group()
        kept = registry.find(group.group_name)
        for _ in range(calls):
            summed(group)
        position = inquiries.own_position(list(table.groups), group.group_name, 0, {})
        begun.append((group.group_name, position.begun, kept in list(table.groups)))
        dist.destroy_process_group()
        assert kept not in list(table.groups)
    (first, *_), (second, *_) = begun
    assert first == second
    assert begun == [(first, 1, True), (first, 0, True)]


@pytest.mark.usefixtures("world")
def test_init_twice_is_an_error(size: int) -> None:  # trap 59
    by_torch = torch.distributed.init_process_group
    for call in (dist.init_process_group, lambda: dist.init_process_group(comm=MPI.COMM_SELF), lambda: by_torch("mpi")):
        error = raised_by(call)  # type: ignore[arg-type]
        agree(isinstance(error, ValueError) and "twice" in str(error), repr(error))
    agree(summed() == size)


@pytest.mark.usefixtures("no_world")
def test_without_a_world(rank: int, size: int) -> None:
    for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier, dist.get_rank, lambda: dist.new_group([0])):
        error = raised_by(call)  # type: ignore[arg-type]
        agree(isinstance(error, ValueError) and "init" in str(error), repr(error))


@pytest.mark.usefixtures("no_world")
def test_a_destroyed_world_says_so(rank: int, size: int) -> None:
    dist.init_process_group()
    world, group = dist.group.WORLD, dist.new_group()
    communicator = registry.find(world.group_name)  # type: ignore[union-attr]
    assert communicator is not None
    summed(), summed(group)
    dist.destroy_process_group()
    for gone in (world, group):
        for call in (lambda gone=gone: summed(gone), lambda gone=gone: gone.allreduce([torch.ones(1)]).wait()):  # type: ignore[misc]
            error = raised_by(call)  # type: ignore[arg-type]
            agree(isinstance(error, dist.GroupDestroyed) and "destroyed" in str(error), repr(error))
    for call in (communicator.barrier, lambda: communicator.isend(torch.ones(1), 0)):
        error = raised_by(call)  # type: ignore[arg-type]
        agree(isinstance(error, dist.GroupDestroyed) and f"rank {rank} of {size}" in str(error), repr(error))
    communicator.close()  # a second time does nothing
    dist.init_process_group()
    error = raised_by(lambda: summed(world))
    agree(isinstance(error, dist.GroupDestroyed) and summed() == size, repr(error))


@pytest.mark.usefixtures("no_world")
def test_a_communicator_of_the_users_own_as_the_world(rank: int, size: int) -> None:
    """Two halves of the job are two worlds at once; then the whole job is one again."""
    for is_freed in (False, True):  # by the program, once the world is there
        half = MPI.COMM_WORLD.Split(rank % 2, -rank)  # in reverse order, so that ranks differ from COMM_WORLD's
        members = sorted(range(rank % 2, size, 2), reverse=True)
        dist.init_process_group(comm=half)
        if is_freed:
            half.Free()
        agree(summed(value=rank) == sum(members), f"{summed(value=rank)}")
        agree((dist.get_rank(), dist.get_world_size()) == (members.index(rank), len(members)), f"{dist.get_rank()}")
        group = dist.new_group(range(len(members)))
        dist.all_reduce(torch.ones(2), group=group, async_op=True).wait()
        objects: list[Any] = [None] * len(members)
        dist.all_gather_object(objects, rank)
        agree(objects == members, f"{objects}")
        dist.destroy_process_group()
        if not is_freed:
            half.Free()
        dist.init_process_group()
        agree(summed() == size)
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_world")
def test_the_applications_own_messages_do_not_mix_with_ours(rank: int, size: int) -> None:  # trap 52
    request = MPI.COMM_WORLD.Irecv(bytearray(8), MPI.ANY_SOURCE, MPI.ANY_TAG)
    dist.init_process_group()
    for _ in range(3):
        summed()
        received = torch.zeros(1)
        work = dist.irecv(received)
        dist.isend(torch.ones(1), (rank + 1) % size, tag=0).wait()
        work.wait()
    dist.monitored_barrier()
    agree(not request.Test(), "a message of ours came to the application's receive")
    MPI.COMM_WORLD.Send(bytearray(8), (rank + 1) % size, 1)
    request.Wait()


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.timeout(180)
def test_3000_groups_in_a_row(rank: int, size: int) -> None:  # trap 51
    before = len(registry._groups)
    for index in range(3000 if size <= 2 else 300):  # MPICH needs 20 ms for each where ranks share cores
        group = dist.new_group()
        if index % 100 == 0:
            agree(summed(group) == size)
        dist.destroy_process_group(group)
    for index in range(300):
        group = dist.new_group([index % size])
        if group is not OUTSIDE:
            dist.destroy_process_group(group)
    agree(summed() == size and len(registry._groups) == before)


@pytest.mark.usefixtures("world")
def test_groups_by_their_members_alone(rank: int, size: int) -> None:  # trap 50
    """With local synchronisation only the members call; pairs that overlap are made along a ring, in one order."""
    made = {}
    for first in range(size - 1):
        if rank in (first, first + 1):
            made[first] = dist.new_group([first, first + 1], use_local_synchronization=True)
    sums = {first: summed(group, rank) for first, group in made.items()}
    agree(all(value == 2 * first + 1 for first, value in sums.items()), f"{sums}")
    for group in made.values():
        dist.destroy_process_group(group)


@pytest.mark.usefixtures("no_world")
def test_a_rank_that_destroys_nothing_holds_up_nobody(rank: int, size: int) -> None:  # trap 51
    dist.init_process_group()
    group = dist.new_group()
    agree(summed(group) == size)
    if rank == 0:
        dist.destroy_process_group(group)
        error = raised_by(lambda: summed(group))
        assert isinstance(error, dist.GroupDestroyed)
    other = dist.new_group()
    agree(summed(other) == size == summed())


@pytest.mark.usefixtures("world")
def test_a_group_that_is_dropped_talks_to_nobody(rank: int, size: int) -> None:  # traps 47, 51
    """Collection happens at different times on different ranks, so nothing may depend on it."""
    if rank % 2 == 0:
        gc.collect()
    for _ in range(5):
        group = dist.new_group()
        summed(group)
        del group
        if rank == 0:
            gc.collect()
    agree(summed() == size)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("age_s", [0.0, 1.2])
def test_a_closed_communicator_is_forgotten(rank: int, size: int, age_s: float) -> None:
    """The watchdog looks at all groups once a second, and kept them until it looked again."""
    communicator = registry.create("forgotten", list(range(size)), 60)
    tensor = torch.ones(1)
    communicator.all_reduce(tensor)
    communicator.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
    time.sleep(age_s)
    communicator.close()
    gone = weakref.ref(communicator)
    del communicator
    gc.collect()
    agree(registry.find("forgotten") is None and gone() is None and tensor.item() == size**2, f"{tensor}")


@pytest.mark.usefixtures("world")
def test_destroying_a_group_lets_what_is_queued_end(rank: int, size: int) -> None:
    group = dist.new_group()
    tensors = [torch.full((1 << 16,), 1.0) for _ in range(10)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group(group)
    agree(all(work.is_completed() and work.is_success() for work in works) and tensors[-1][0] == size, f"{works}")


@pytest.mark.usefixtures("world")
def test_destroying_a_group_takes_back_its_receives(rank: int, size: int) -> None:
    group = dist.new_group()
    work = dist.irecv(torch.zeros(2), (rank + 1) % size, group=group)
    dist.destroy_process_group(group)
    error = raised_by(work.wait)
    agree(isinstance(error, dist.GroupDestroyed) and work.is_completed() and not work.is_success(), repr(error))
    agree(summed() == size)


@pytest.mark.usefixtures("no_world")
def test_init_in_another_thread(rank: int, size: int) -> None:
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.append(dist.init_process_group() or summed()))  # type: ignore[func-returns-value]
    thread.start()
    thread.join(30)
    agree(got == [size] and summed() == size, f"{got}")
