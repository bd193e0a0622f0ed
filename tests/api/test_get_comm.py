"""mpicoll.get_comm: the mpi4py communicator of a group."""

import pytest
import torch
import torch.distributed
from mpi4py import MPI

import mpicoll as dist
from tests.support import agree


@pytest.mark.usefixtures("world")
def test_it_has_the_ranks_of_the_world_and_is_made_once(rank: int, size: int) -> None:
    comm = dist.get_comm()
    agree((comm.Get_rank(), comm.Get_size()) == (rank, size))
    agree(comm.allgather(rank) == list(range(size)))
    if rank == 0:  # the other ranks need not call it again
        assert dist.get_comm() is comm
        assert dist.get_comm(dist.group.WORLD) is comm
    agree(comm != MPI.COMM_WORLD)


@pytest.mark.usefixtures("world")
def test_a_group_has_its_own_and_other_ranks_get_an_error(rank: int, size: int) -> None:
    members = list(range(0, size, 2))
    group = torch.distributed.new_group(members)
    if rank in members:
        comm = dist.get_comm(group)
        right = comm.allgather(rank) == members
    else:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            dist.get_comm(group)
        right = True
    agree(right)


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("world")
def test_messages_of_the_program_and_of_mpicoll_do_not_meet(rank: int, size: int) -> None:
    comm = dist.get_comm()
    after, before = (rank + 1) % size, (rank - 1) % size
    ours, theirs = torch.full((4,), float(rank)), torch.full((4,), float(-rank))
    got_ours, got_theirs = torch.zeros(4), torch.zeros(4)
    sent = dist.isend(ours, after)  # same source, tag and size; mpicoll's is sent first and received last
    request = comm.Isend(theirs.numpy(), after)
    comm.Recv(got_theirs.numpy(), before, MPI.ANY_TAG)
    dist.recv(got_ours, before)
    sent.wait()
    request.Wait()
    agree((got_ours == before).all() and (got_theirs == -before).all(), (got_ours, got_theirs))


@pytest.mark.usefixtures("world")
def test_the_first_use_keeps_the_order_of_the_group(size: int) -> None:
    group = dist.new_group()
    tensors = [torch.ones(100_000) for _ in range(4)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    total = dist.get_comm(group).allreduce(1)
    for work in works:
        work.wait()
    agree(total == size and all((tensor == size).all() for tensor in tensors))
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("world")
def test_destroying_the_group_frees_it() -> None:
    group = dist.new_group()
    comm = dist.get_comm(group)
    dist.destroy_process_group(group)
    agree(comm == MPI.COMM_NULL)
    with pytest.raises(ValueError, match="the group has been destroyed"):
        dist.get_comm(group)


@pytest.mark.usefixtures("world")
def test_one_that_the_program_has_freed_is_made_again(size: int) -> None:
    group = dist.new_group()
    dist.get_comm(group).Free()
    agree(dist.get_comm(group).allreduce(1) == size)
    dist.get_comm(group).Free()
    dist.destroy_process_group(group)


@pytest.mark.usefixtures("world")
def test_other_backends_have_none() -> None:
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="the group's backend is 'gloo'"):
        dist.get_comm(gloo)
    dist.barrier()  # a rank that destroys it closes the connections of those that still make it
    dist.destroy_process_group(gloo)


def test_without_a_world_it_says_so() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="init_process_group"):
        dist.get_comm()
    dist.init_process_group()
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        dist.get_comm("x")
