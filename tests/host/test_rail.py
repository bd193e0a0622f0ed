"""The calls of a rail: blocking where a message is small, tested where it is large."""

from typing import Any

import pytest
import torch
from mpi4py import MPI

from mpicoll._algorithms.blocks import block
from mpicoll._algorithms.pairwise import TESTED_FROM
from mpicoll._algorithms.rail import LEAST_SLICE, Rail
from mpicoll._api import groups
from mpicoll._mpi.channel import IN_PLACE, Channel
from tests.support import agree


class Recording:
    """A communicator that notes which of its functions move data, with which arguments."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.called, self.arguments = comm, list[str](), list[Any]()
        self.sent = 0  # bytes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("Get_"):
            return getattr(self.comm, name)

        def call(*arguments: Any) -> Any:
            self.called.append(name)
            self.sent += arguments[0][1] if name == "Isend" else 0
            self.arguments += arguments
            return getattr(self.comm, name)(*arguments)

        return call


@pytest.fixture
def channel(world: None) -> Channel:
    known = groups.of(None)
    assert known is not None
    return known.channel


@pytest.fixture
def comm(channel: Channel) -> Recording:
    return Recording(channel.comm)


@pytest.fixture
def rail(channel: Channel, comm: Recording) -> Rail:
    return Rail(channel, comm)


@pytest.mark.min_ranks(2)  # as every rail has
@pytest.mark.parametrize("nbytes", [TESTED_FROM - 4, TESTED_FROM])
def test_large_calls_are_tested_and_right(rail: Rail, comm: Recording, rank: int, size: int, nbytes: int) -> None:
    count = nbytes // 4
    sums, root, sent = (torch.full((count,), rank + 1.0) for _ in range(3))
    gathered, scattered = torch.empty(size * count), torch.empty(count)
    blocks = torch.full((size * count,), rank + 1.0)

    rail.reduce(root, MPI.FLOAT, MPI.SUM, 0)
    rail.broadcast(block(root), 0)
    rail.all_reduce(sums, MPI.FLOAT, MPI.SUM, sums, None)
    ends = [rail.all_gather(block(sent), gathered.data_ptr()), rail.reduce_scatter(blocks, scattered, MPI.FLOAT, MPI.SUM)]
    for end in ends:  # both are under way at the same time
        end()
    total = size * (size + 1) / 2
    expected = torch.arange(1.0, size + 1).repeat_interleave(count)
    right = all(bool(tensor.eq(total).all()) for tensor in (sums, root, scattered)) and torch.equal(gathered, expected)
    tested = nbytes >= TESTED_FROM
    others = {"Irecv", "Isend", "Iprobe"} if tested else {"Bcast", "Allreduce", "Allgather", "Reduce_scatter"}
    whole = {"Ibcast", "Iallreduce"} if tested and nbytes < size * LEAST_SLICE else set()  # by one call
    first, *found = comm.called
    agree(whole <= set(found), comm.called)
    agree(right and first == ("Ireduce" if tested else "Reduce") and set(found) <= others | whole, comm.called)
    agree(not rail._unfinished)


@pytest.mark.parametrize("count", [TESTED_FROM // 4, TESTED_FROM // 4 + 1, TESTED_FROM])
def test_an_all_reduce_in_slices(rail: Rail, rank: int, size: int, count: int) -> None:
    """Slices that the number of ranks does not divide, and an operation other than the sum."""
    values = [(torch.arange(count, dtype=torch.int32) * (other + 1)) % 1000 for other in range(size)]
    largest = values[rank].clone()
    rail.all_reduce(largest, MPI.INT32_T, MPI.MAX, largest, None)
    agree(torch.equal(largest, torch.stack(values).amax(0)) and not rail._unfinished)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("nbytes", [TESTED_FROM - 4, TESTED_FROM, 5 * TESTED_FROM + 12])
def test_results_in_half_precision_are_sent_so(rail: Rail, comm: Recording, rank: int, size: int, nbytes: int) -> None:
    """They were sent as float32: eight bytes for each element instead of six."""
    code, out = torch.full((nbytes // 4,), rank + 1.0), torch.empty(nbytes // 4, dtype=torch.bfloat16)
    rail.all_reduce(code, MPI.FLOAT, MPI.SUM, out, lambda reduced, out: out.copy_(reduced))
    agree(bool(out.eq(size * (size + 1) / 2).all()))
    if "Isend" in comm.called:
        slice_ = -(-code.numel() // size)
        own = max(0, min(slice_, code.numel() - rank * slice_))
        agree(comm.sent == 4 * (code.numel() - own) + 2 * own * (size - 1), comm.sent)
    else:
        agree(nbytes < max(TESTED_FROM, size * LEAST_SLICE))


def test_memory_of_an_unfinished_call_is_kept(rail: Rail, rank: int, size: int) -> None:
    """An error elsewhere may leave a call that nobody ends; its messages still use the scratch memory."""
    source, output = torch.ones(size * TESTED_FROM // 4), torch.empty(TESTED_FROM // 4)
    end = rail.reduce_scatter(source, output, MPI.FLOAT, MPI.SUM)
    (kept,) = rail._unfinished.values()
    agree(any(part is source for part in kept[1]) and len(kept[1]) == 2)
    end()
    agree(not rail._unfinished and bool(output.eq(size).all()))


@pytest.mark.parametrize("nbytes", [TESTED_FROM - 4, TESTED_FROM])
def test_a_root_that_must_pass_a_copy(
    channel: Channel, comm: Recording, rank: int, size: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on MPICH 4.0; before, a reduction to another node ended in an AttributeError there."""
    monkeypatch.setattr("mpicoll._mpi.channel.FAULTY_REDUCE", True)
    memory, root = torch.full((nbytes // 4,), rank + 1.0), size - 1
    Rail(channel, comm).reduce(memory, MPI.FLOAT, MPI.SUM, root)
    right = rank != root or bool(memory.eq(size * (size + 1) / 2).all())
    in_place = any(argument is IN_PLACE for argument in comm.arguments)
    agree(right and comm.called == ["Ireduce" if nbytes >= TESTED_FROM else "Reduce"] and in_place == (root == 0), comm.called)
