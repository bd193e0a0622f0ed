"""Calls that torch's own Python code refuses before mpicoll is called, and their like at the other door."""

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed

import mpicoll
from tests.support import agree
from tests.support.doors import collectives, doors, still_works

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using a Backend:UserWarning"),
]
Call = Callable[[Any], object]
NO_GROUPS = ("x", 7, [0, 1], object())  # torch takes 0 and "" for None in half of its functions


def calls(door: Any, rank: int, size: int) -> dict[str, Call]:
    """A call of each function with a group, which no group would refuse otherwise."""
    one, several, peer = torch.ones(2), [rank] * size, (rank + 1) % size
    found: dict[str, Call] = {
        "all_gather_object": lambda group: door.all_gather_object([None] * size, rank, group=group),
        "all_reduce, by position": lambda group: door.all_reduce(one, door.ReduceOp.SUM, group),
        "broadcast_object_list": lambda group: door.broadcast_object_list([rank], 0, group=group),
        "gather_object": lambda group: door.gather_object(rank, [None] * size if rank == 0 else None, 0, group=group),
        "recv": lambda group: door.recv(one, peer, group=group),
        "recv, from any rank": lambda group: door.recv(one, group=group),
        "recv_object_list": lambda group: door.recv_object_list([None], peer, group=group),
        "scatter_object_list": lambda group: door.scatter_object_list([None], several if rank == 0 else None, 0, group=group),
        "send": lambda group: door.send(one, peer, group=group),
        "send_object_list": lambda group: door.send_object_list([rank], peer, group=group),
    }
    for name, call in collectives(door, rank, size, root=0).items():
        if not (name.startswith("_") or (door is torch.distributed and "coalesced" in name)):  # torch wraps neither
            found[name] = lambda group, start=call.start: start(group=group)  # type: ignore[misc]
    return found


def object_calls(door: Any, rank: int, size: int) -> dict[str, tuple[Call, bool]]:
    """A call of each function for objects with this rank's object, and whether this rank gets the object of rank 0."""
    gathered = [None] * size if rank == size - 1 else None
    return {
        "all_gather_object": (lambda obj: door.all_gather_object([None] * size, obj), True),
        "gather_object": (lambda obj: door.gather_object(obj, gathered, size - 1), rank == size - 1),
        "broadcast_object_list": (lambda obj: door.broadcast_object_list([1, obj, 2], 0), True),
        "scatter_object_list": (lambda obj: door.scatter_object_list([None], [obj] * size if rank == 0 else None, 0), True),
        "send_object_list": (
            lambda obj: door.send_object_list([obj, 1], 1) if rank == 0 else rank == 1 and door.recv_object_list([0, 0], 0),
            rank == 1,
        ),
    }


@doors
def test_an_error_has_the_name_that_the_program_has_called(door: Any, size: int) -> None:
    """(It named all_gather_single, which torch 2.12 does not have.)"""
    whole, part = torch.ones(2 * size), torch.ones(2, dtype=torch.int64)
    functions = {
        "all_gather_into_tensor": lambda: door.all_gather_into_tensor(whole, part),
        "reduce_scatter_tensor": lambda: door.reduce_scatter_tensor(part, whole),
    }
    if hasattr(door, "all_gather_single"):
        functions["all_gather_single"] = lambda: door.all_gather_single(whole, part)
        functions["reduce_scatter_single"] = lambda: door.reduce_scatter_single(part, whole)
    said: dict[str, str] = {}
    for name, call in functions.items():
        with pytest.raises(TypeError) as raised:
            call()
        said[name] = str(raised.value)
    agree(all(text.startswith(f"{name}: ") for name, text in said.items()) and still_works(size), said)


@doors
def test_a_group_that_is_none_is_a_type_error(door: Any, rank: int, size: int) -> None:
    wrong = []
    for name, call in calls(door, rank, size).items():
        for group in NO_GROUPS:
            try:
                call(group)
                wrong.append(f"{name} took {group!r}")
            except TypeError as error:
                expected = f"group must be a ProcessGroup or None, got {type(group).__name__}"
                if expected not in str(error) or name.partition(",")[0][:8] not in str(error):
                    wrong.append(f"{name}: {error}")
            except Exception as error:  # noqa: BLE001  whatever else it is goes into the report
                wrong.append(f"{name}, {group!r}: {type(error).__name__}: {error}")
    agree(not wrong and still_works(size), "\n".join(wrong))


@pytest.mark.min_ranks(2)
@doors
@pytest.mark.parametrize(
    "function", ["all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"]
)
def test_an_object_that_does_not_pickle_on_one_rank(function: str, door: Any, rank: int, size: int) -> None:
    """It gets the error of pickle, and the ranks that wait for the object an error that quotes it. The group works on."""
    call, gets = object_calls(door, rank, size)[function]
    error: Exception | None = None
    try:
        call(threading.Lock() if rank == 0 else rank)
    except Exception as raised:  # noqa: BLE001  looked at below
        error = raised
    if rank == 0:
        right = type(error) is TypeError and "cannot pickle" in str(error)
    elif gets:
        said = rf"^{function} on group '0' \(rank 0 of {size}\): an object does not pickle there: TypeError: cannot pickle"
        right = type(error) is mpicoll.MpicollError and re.search(said, str(error)) is not None
    else:
        right = error is None
    agree(right and still_works(size), repr(error))


@pytest.mark.parametrize("ranks", [2, None], ids=["two ranks", "all ranks"])
def test_objects_that_do_not_pickle_on_several_ranks(ranks: int | None, rank: int, size: int) -> None:
    """Each gets its own error."""
    has_one = ranks is None or rank < ranks
    with pytest.raises(TypeError if has_one else mpicoll.MpicollError, match="pickle"):
        mpicoll.all_gather_object([None] * size, threading.Lock() if has_one else rank)
    agree(still_works(size))


@pytest.mark.min_ranks(2)
def test_a_receiver_from_any_rank_learns_it_too(rank: int, size: int) -> None:
    if rank == 0:
        with pytest.raises(TypeError, match="cannot pickle"):
            mpicoll.send_object_list([threading.Lock(), 1], 1)
    elif rank == 1:
        with pytest.raises(mpicoll.MpicollError, match=r"send_object_list .*rank 0 of \d+\): an object does not pickle there"):
            mpicoll.recv_object_list([None, None])
    agree(still_works(size))
