"""A tensor that is resized, or whose storage is freed, while an operation uses it: an error at wait, nothing overwritten."""

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

import mpicoll
from mpicoll._api import groups
from mpicoll.errors import GroupFailed, MpicollError
from tests.support import agree, everyone

pytestmark = pytest.mark.usefixtures("world")

Resize = Callable[[Tensor], object]
DOORS = pytest.mark.parametrize("door", [mpicoll, torch.distributed], ids=["mpicoll", "torch"])
RESIZES: dict[str, Resize] = {
    "grow": lambda tensor: tensor.resize_(4 * tensor.numel()),
    "shrink": lambda tensor: tensor.resize_(1),
    "free": lambda tensor: tensor.untyped_storage().resize_(0),
    "set_": lambda tensor: tensor.set_(torch.zeros(3)),
    "data": lambda tensor: setattr(tensor, "data", torch.zeros(3)),
}
# Those that leave the old memory alone, so that MPI may be using it.
GENTLE = {name: RESIZES[name] for name in ("shrink", "set_", "data")}
SIZES = pytest.mark.parametrize("count", [3, 600_000])  # one MPI call, the shared window


def flat(count: int) -> Tensor:
    return torch.ones(count)


def strided(count: int) -> Tensor:
    return torch.ones(count, 2)[:, 0]


def error_of(work: Any) -> Exception | None:
    try:
        work.wait()
    except Exception as error:  # noqa: BLE001  the tests look at it
        return error
    return None


def says_so(error: Exception | None, operation: str) -> bool:
    return isinstance(error, MpicollError) and str(error).startswith(f"{operation} on") and "was resized" in str(error)


@DOORS
@SIZES
@pytest.mark.parametrize("make", [flat, strided])
@pytest.mark.parametrize("name", RESIZES)
def test_before_the_operation_begins(name: str, make: Callable[[int], Tensor], count: int, door: ModuleType, size: int) -> None:
    """MPI never gets freed memory. The ranks may be out of step then, so the group refuses further use."""
    if make is strided and name == "grow":
        name = "free"  # a strided tensor grows into storage that it has
    group = door.new_group()
    turn = threading.Event()
    groups.of(group).run("barrier", (turn.wait, (20,), ()), [], async_op=True)
    tensor = make(count)
    old = tensor.detach()
    work = door.all_reduce(tensor, group=group, async_op=True)
    RESIZES[name](tensor)
    turn.set()
    error = error_of(work)
    if name in GENTLE:
        goes_on = bool((old == size).all())
        door.all_reduce(torch.ones(1), group=group)
    else:
        goes_on = True
        with pytest.raises(GroupFailed, match="resized"):
            door.all_reduce(torch.ones(1), group=group)
    door.destroy_process_group(group)
    agree(says_so(error, "all_reduce") and goes_on, error)


@SIZES
@pytest.mark.parametrize("name", GENTLE)
@pytest.mark.min_ranks(2)
def test_while_another_rank_is_awaited(name: str, count: int, rank: int, size: int) -> None:
    """The other ranks get the result; the group goes on."""
    tensor, old = torch.ones(count), torch.ones(1)
    if rank == 1:
        old = tensor.detach()
        work = mpicoll.all_reduce(tensor, async_op=True)
        while groups.of(None).under_way() is None:
            pass
        GENTLE[name](tensor)
    everyone(None)
    if rank != 1:
        work = mpicoll.all_reduce(tensor, async_op=True)
    error = error_of(work)
    expected = says_so(error, "all_reduce") if rank == 1 else error is None and bool((tensor == size).all())
    agree(expected, error)
    after = torch.ones(2)
    mpicoll.all_reduce(after)
    agree(after[0] == size and (rank != 1 or (old == size).all()), (after, old))


@SIZES
@pytest.mark.parametrize("name", GENTLE)
@pytest.mark.min_ranks(2)
def test_a_receive(name: str, count: int, rank: int) -> None:
    """The message ends in the memory that the receive was given."""
    error, tensor = None, torch.zeros(count)
    old = tensor.detach()
    if rank == 1:
        work = mpicoll.irecv(tensor, 0)
        GENTLE[name](tensor)
    everyone(None)
    if rank == 0:
        mpicoll.send(torch.ones(count), 1)
    if rank == 1:
        error = error_of(work)
    agree(rank != 1 or (says_so(error, "irecv") and (old == 1).all()), error)


def test_storages_are_freed_after_the_wait(size: int) -> None:
    """As FSDP does it: nothing is refused, before or after."""
    tensor = torch.empty(5000)
    for _ in range(3):
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.fill_(1)
        mpicoll.all_reduce(tensor, async_op=True).wait()
        agree((tensor == size).all())
        tensor.untyped_storage().resize_(0)


def test_other_shapes_of_the_same_memory(size: int) -> None:
    tensor = torch.ones(6, 4)
    work = mpicoll.all_reduce(tensor, async_op=True)
    tensor.unsqueeze_(0)
    work.wait()
    agree(tensor.shape == (1, 6, 4) and (tensor == size).all())
