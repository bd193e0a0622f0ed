"""Without MPICOLL_CHECK: different collectives that meet in shared memory raise on all ranks, before a result is touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

import mpicoll
from mpicoll._algorithms.shared_memory import barrier, reduce_flat
from mpicoll._algorithms.window import Window
from mpicoll._api import groups
from mpicoll._mpi import runtime, shared_segment
from mpicoll._mpi.backoff import Backoff
from mpicoll._tensors.calls import DifferentCalls
from tests.support import agree, everyone

pytestmark = [pytest.mark.min_ranks(2), pytest.mark.one_node, pytest.mark.usefixtures("world")]
COUNT = 1 << 22  # elements; all collectives on 16 MiB go through shared memory
MAX = mpicoll.ReduceOp.MAX

Collective = Callable[[Any, Tensor, Any], Any]
KINDS: dict[str, tuple[Collective, Collective]] = {
    "reduction": (lambda api, t, g: api.all_reduce(t, group=g), lambda api, t, g: api.all_reduce(t, MAX, group=g)),
    "dtype": (
        lambda api, t, g: api.broadcast(t, 0, group=g),
        lambda api, t, g: api.broadcast(t.view(torch.int32), 0, group=g),
    ),
    "operation": (lambda api, t, g: api.all_reduce(t, group=g), lambda api, t, g: api.reduce(t, 0, group=g)),
    "barrier": (lambda api, t, g: api.all_reduce(t, group=g), lambda api, t, g: api.barrier(group=g)),
    "length": (lambda api, t, g: api.all_reduce(t, group=g), lambda api, t, g: api.all_reduce(t[: COUNT // 2], group=g)),
}


@pytest.mark.parametrize("api", [mpicoll, torch.distributed], ids=["mpicoll", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_large_ones(api: Any, kind: str, rank: int, size: int) -> None:
    group: Any = mpicoll.new_group()
    communicator = groups.of(group)
    assert communicator is not None
    usual, other = KINDS[kind]
    tensor, said = torch.full((COUNT,), float(rank)), ""
    api.all_reduce(torch.zeros(COUNT), group=group)  # makes the window, without which a barrier goes through MPI
    try:
        (other if rank == size - 1 else usual)(api, tensor, group)
    except mpicoll.CollectiveMismatch as error:
        said = str(error)
    agree(f"rank {size - 1}: " in said, everyone(said))
    # A rank that calls the same broadcast as the root may have got a part of its data.
    agree((kind == "dtype" and rank not in (0, size - 1)) or tensor.eq(rank).all(), "a tensor has changed")
    if said:
        with pytest.raises(mpicoll.GroupFailed):
            api.all_reduce(tensor, group=group)
    mpicoll.destroy_process_group(group)
    ones = torch.ones(COUNT)
    mpicoll.all_reduce(ones)
    agree(ones.eq(size).all(), "the world is not affected")


def test_every_turn_is_compared(rank: int, size: int) -> None:
    """Also where the slot of an earlier collective with the right number is still there."""
    comm = runtime.start().comm
    segment = shared_segment.create(comm, Window.nbytes(size, 4096))
    assert segment is not None
    window = Window(segment, rank, size, 4096, lambda _: Backoff().pause, spins=10)
    memory = torch.ones(8)
    for window.call in (7, 7, 8, 9, 9):
        reduce_flat(window, memory, memory, lambda parts, out: None)
    assert barrier(window, 10)
    window.call = 7 if rank == 0 else 8
    with pytest.raises(DifferentCalls):
        reduce_flat(window, memory, memory, lambda parts, out: None)
    agree(True)
