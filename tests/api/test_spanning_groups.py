"""`new_group(comm=...)`: a group of the ranks of a communicator, which may be of several worlds."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI

import mpicoll as dist
from mpicoll._engine.registry import registry
from tests.support import agree, launch, raised_by

OUTSIDE = dist.GroupMember.NON_GROUP_MEMBER


@pytest.fixture
def half(no_world: None, rank: int) -> Iterator[int]:
    """Two worlds at once, of the ranks with even and with odd numbers. Returns the size of this one."""
    own = MPI.COMM_WORLD.Split(rank % 2, rank)
    dist.init_process_group(comm=own)
    own.Free()
    yield dist.get_world_size()
    dist.destroy_process_group()


def test_a_group_of_two_worlds(half: int, rank: int, size: int) -> None:
    """In reverse order, so that its ranks are no rank of MPI.COMM_WORLD, and none of a world."""
    whole = MPI.COMM_WORLD.Split(0, -rank)
    group = dist.new_group(comm=whole)
    whole.Free()
    place = size - 1 - rank
    agree((dist.get_rank(group), dist.get_group_rank(group, place)) == (place, place), f"{dist.get_rank(group)}")
    agree((dist.get_world_size(group), dist.get_backend(group)) == (size, "mpi"))
    agree(dist.get_rank() == rank // 2, f"{dist.get_rank()}")
    agree(dist.get_process_group_ranks(group) == list(range(size)), f"{dist.get_process_group_ranks(group)}")
    for nbytes in (4, 4 << 20):  # one call of MPI, and in shared memory
        x = torch.full((nbytes // 4,), float(place))
        dist.all_reduce(x, group=group)
        agree(bool((x == size * (size - 1) / 2).all()), f"all_reduce of {nbytes} bytes: {x[:4]}")
        x = torch.full((nbytes // 4,), float(place))
        dist.broadcast(x, src=size - 1, group=group)
        agree(bool((x == size - 1).all()), f"broadcast of {nbytes} bytes: {x[:4]}")
        received = torch.empty(nbytes // 4)
        works = [
            dist.isend(torch.full_like(received, float(place)), (place + 1) % size, group),
            dist.irecv(received, (place - 1) % size, group),
        ]
        for work in works:
            work.wait()
        agree(bool((received == (place - 1) % size).all()), f"a message of {nbytes} bytes: {received[:4]}")
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, place, group=group)
    agree(objects == list(range(size)), f"{objects}")
    work = dist.all_reduce(x := torch.ones(3), group=group, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier(group)
    agree(x.tolist() == [size] * 3, f"{x}")


def test_the_worlds_go_on_beside_it(half: int, rank: int, size: int) -> None:
    """Groups of one world have the same numbers on its ranks, whoever of them is in a group of several worlds."""
    member = rank < 2
    group = dist.new_group(comm=MPI.COMM_WORLD.Split(0 if member else MPI.UNDEFINED, rank))
    agree((group is OUTSIDE) == (not member), f"{group}")
    for _ in range(3):
        own = dist.new_group()
        dist.all_reduce(x := torch.ones(1), group=own)
        agree(x.item() == half, f"{x}")
        if member:
            dist.all_reduce(x := torch.ones(1), group=group)
            assert x.item() == min(2, size)
        dist.destroy_process_group(own)
    subset = dist.new_group([0])
    agree((subset is not OUTSIDE) == (dist.get_rank() == 0))


def test_its_communicators_are_freed_with_it(half: int) -> None:
    """MPICH has 2048 for each process."""
    for whole in (MPI.COMM_WORLD, MPI.COMM_WORLD.Dup(), MPI.COMM_SELF):
        group = dist.new_group(comm=whole)
        communicator = registry.find(group.group_name)
        assert communicator is not None
        channel = communicator.channel
        dist.destroy_process_group(group)
        of_world = whole == MPI.COMM_WORLD  # it has one duplicate until the program ends
        agree(not channel.comm and bool(channel.runtime.__dict__["comm"]) == of_world, f"{channel.runtime.__dict__}")
        dist.all_reduce(torch.ones(1))  # the world is as before


def test_a_rank_that_does_not_come_is_named(half: int, rank: int, size: int) -> None:
    """It is told so when it comes. A second try of all ranks works."""
    whole, last = MPI.COMM_WORLD.Dup(), size - 1
    if size > 1:
        if rank == last:
            MPI.COMM_WORLD.recv(source=0)  # the others have given up
        error = raised_by(lambda: dist.new_group(comm=whole, timeout=timedelta(seconds=0.2)))
        if rank == 0:
            MPI.COMM_WORLD.send(None, last)
        agree(isinstance(error, dist.OperationTimeout) and f"rank {last} did not come" in str(error), repr(error))
    group = dist.new_group(comm=whole)
    dist.all_reduce(x := torch.ones(1), group=group)
    agree(x.item() == size, f"{x}")
    whole.Free()


def test_a_flight_record_does_not_take_its_ranks_for_ranks_of_the_world(half: int, size: int, tmp_path: Path) -> None:
    """`mpicoll doctor dump` would compare the calls of this rank with those of another one that has its number."""
    group = dist.new_group(comm=MPI.COMM_WORLD)
    dist.all_reduce(torch.ones(1), group=group)
    record = json.loads(Path(dist.dump_flight_record(str(tmp_path))).read_text())
    ranks = {each["name"]: each["ranks"] for each in record["groups"]}
    agree(len(ranks[group.group_name]) == size and min(ranks[group.group_name]) > size, f"{ranks}")


@pytest.mark.usefixtures("world")
def test_bad_arguments() -> None:
    comm = MPI.COMM_WORLD
    for named, arguments in (
        ("ranks", {"ranks": [0]}),
        ("backend 'gloo'", {"backend": "gloo"}),
        ("use_local_synchronization", {"use_local_synchronization": True}),
    ):
        error = raised_by(lambda arguments=arguments: dist.new_group(comm=comm, **arguments))  # type: ignore[misc]
        agree(isinstance(error, ValueError) and f"new_group: {named} given with comm" in str(error), repr(error))
    for wrong in (dist.group.WORLD, 3):
        error = raised_by(lambda wrong=wrong: dist.new_group(comm=wrong))  # type: ignore[misc]
        agree(isinstance(error, TypeError) and "must be an intracommunicator" in str(error), repr(error))
    agree(dist.new_group(comm=MPI.COMM_NULL) is OUTSIDE)
    dist.all_reduce(x := torch.ones(1), group=dist.new_group(backend="mpi", comm=comm))
    agree(x.item() == dist.get_world_size(), f"{x}")


LATE = """
import sys
import time
from datetime import timedelta

import torch
from mpi4py import MPI

import mpicoll as dist

rank, way = MPI.COMM_WORLD.Get_rank(), sys.argv[1]
dist.init_process_group(comm=MPI.COMM_WORLD.Split(rank))
group = dist.new_group(comm=MPI.COMM_WORLD, timeout=timedelta(seconds=2), pg_options={"MPICOLL_ON_TIMEOUT": way})
if rank == 0:
    try:
        dist.broadcast(torch.ones(1), src=1, group=group)
    except dist.OperationTimeout as error:
        print(f"raised: {error}")
        dist.all_reduce(torch.ones(1))
        print("the world goes on")
else:
    time.sleep(8)
"""


@pytest.mark.launch
@pytest.mark.parametrize("way", ["end", "raise"])
def test_ranks_of_another_world_that_do_not_come(way: str) -> None:
    """No rank is blamed: the numbers of the group are not those of the job."""
    done = launch(2, "-c", LATE, way)
    said = f"{done.stdout}\n{done.stderr}"
    assert "The group has ranks of several worlds: what they have done last is not known" in said, said
    if way == "raise":
        assert "raised: broadcast on group 'comm 1' (rank 0 of 2)" in done.stdout, said
        assert "the world goes on" in done.stdout, said
    else:
        assert done.returncode != 0, said
        assert "broadcast exceeded the group's timeout of 2 s" in done.stderr, said
        assert "rank 1 of 2" not in done.stderr, said


ALONE = """
from mpi4py import MPI

import mpicoll as dist

dist.init_process_group(comm=MPI.COMM_SELF)
if MPI.COMM_WORLD.Get_rank() == 0:
    raise ZeroDivisionError("of a trainer of one rank")
MPI.COMM_WORLD.recv(source=0)
"""


@pytest.mark.launch
def test_an_exception_in_a_world_of_one_rank_ends_the_job() -> None:
    """It was left to MPI_Finalize, which waits for the ranks of the other worlds."""
    done = launch(2, "-c", ALONE)
    assert done.returncode != 0, done.stderr
    assert "uncaught ZeroDivisionError" in done.stderr, done.stderr
