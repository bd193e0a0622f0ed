"""RRef: who owns what, for how long, and what it can be asked (traps 86, 90)."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from typing import Any, ClassVar

import pytest
import torch

from mpicoll import rpc
from mpicoll.rpc.agent import Agent
from mpicoll.rpc.owned_objects import WHOLE, OwnedObjects
from mpicoll.rpc.rref import RRef
from tests.support import agree, eventually, everyone

collected = functools.partial(eventually, meanwhile=gc.collect)


class Thing:
    """Something with a state, whose end can be seen. ``alive``: those of this worker."""

    alive: ClassVar[weakref.WeakSet[Thing]] = weakref.WeakSet()

    def __init__(self, value: int = 0, after: float = 0.0) -> None:
        time.sleep(after)
        self.value = value
        Thing.alive.add(self)

    def add(self, n: int) -> int:
        self.value += n
        return self.value


def broken() -> None:
    raise OSError("could not be made")


def here_of(rref: RRef[Any]) -> Any:
    return rref.to_here()


def test_it_waits_until_the_object_is_there(right: str, workers: list[str], rank: int, size: int) -> None:
    """to_here, here, at the owner and on a third worker, whose question reaches the owner before the object does (trap 90)."""
    rref = rpc.remote(right, Thing, (3, 0.3))
    early = rref.confirmed_by_owner() and not rref.is_owner()
    asking = [rpc.rpc_async(worker, here_of, (rref,)) for worker in (right, workers[(rank + 2) % size])]
    here = rref.to_here().value
    del rref
    agree(not early and here == 3 and [future.wait().value for future in asking] == [3, 3])


def test_what_went_wrong_when_it_was_made(right: str, workers: list[str], rank: int, size: int) -> None:
    """Raised by to_here and methods, here and on a third worker, and by the future of an object of one's own."""
    rref, own = rpc.remote(right, broken), rpc.remote(workers[rank], broken)
    third = workers[(rank + 2) % size]
    for call in (
        rref.to_here, rref.rpc_sync().add, lambda: rpc.rpc_sync(third, here_of, (rref,)), own.to_here, own._get_future().wait,
    ):  # fmt: skip
        with pytest.raises(OSError, match="could not be made"):
            call()
    agree(True)


def test_a_call_that_is_never_sent(right: str, workers: list[str], rank: int) -> None:
    """Its argument cannot be pickled: nothing of the reference is left, on the caller, on the owner, or on both in one."""
    for to in (right, workers[rank]):
        with pytest.raises(TypeError, match="pickle"):
            rpc.remote(to, list, (threading.Lock(),))
    gc.collect()
    everyone(None)
    rpc.rpc_sync(right, list)  # it comes behind what the reference's end may have sent
    time.sleep(0.2)
    agree(not Agent.get().objects.all(), Agent.get().objects.all())


def alive() -> int:
    gc.collect()
    return len(Thing.alive)


_kept: list[Any] = []


def keep(rref: RRef[Any], names: list[str]) -> str:
    """Keeps it, and passes it on to the next that is named."""
    _kept.append(rref)
    if names:
        rpc.rpc_sync(names[0], keep, (rref, names[1:]))
    return rref.owner_name()


def drop() -> None:
    _kept.clear()


def use() -> list[Any]:
    return [rref.rpc_sync().add(0) for rref in _kept]


@pytest.mark.parametrize("order", ["creator first", "creator last"])
def test_forks(order: str, workers: list[str], rank: int, size: int) -> None:
    """A reference goes from worker to worker, around all of them; each copy keeps the object, in whatever order they go."""
    everyone(None)
    owner = workers[(rank + 1) % size]
    others = [workers[(rank + k) % size] for k in range(2, size + 2)]  # the last but one is this worker, the last the owner
    rref: Any = rpc.remote(owner, Thing, (rank,))
    said = rpc.rpc_sync(others[0], keep, (rref, others[1:]))
    everyone(None)
    answers = use()
    everyone(None)
    if order == "creator first":
        rref = None
        drop()
        everyone(None)
        gone = collected(lambda: rpc.rpc_sync(owner, alive) == 0)
    else:
        drop()
        everyone(None)
        still = rref.rpc_sync().add(0) == rank and rpc.rpc_sync(owner, alive) == 1
        everyone(None)
        rref = None
        gone = still and collected(lambda: rpc.rpc_sync(owner, alive) == 0)
    everyone(None)
    agree(said == owner and sorted(answers) == list(range(size)) and gone, (said, answers, gone))
    agree(collected(lambda: not Agent.get().objects.all()), Agent.get().objects.all())


def test_a_failed_pickle_gives_the_weight_back(right: str, rank: int) -> None:
    """A call that could not be sent has given nothing away."""
    everyone(None)
    rref: Any = rpc.remote(right, Thing)
    rref.rpc_sync().add(1)
    with pytest.raises(TypeError):
        rpc.rpc_sync(right, keep, (rref, [threading.Lock()]))
    everyone(None)
    rref = None
    gone = collected(lambda: not Agent.get().objects.all() and alive() == 0)  # the thread that drops it may come last
    agree(gone, (Agent.get().objects.all(), alive()))


def test_backward_of_a_local_graph(right: str, rank: int) -> None:
    """Without a context: the owner's own backward."""
    rref = rpc.remote(right, leaf)
    loss = rpc.remote(right, squared, (rref,))
    loss.backward()
    agree(rpc.rpc_sync(right, gradient_of, (rref,)).tolist() == [2.0, 4.0])


def leaf() -> torch.Tensor:
    return torch.tensor([1.0, 2.0], requires_grad=True)


def squared(rref: RRef[torch.Tensor]) -> torch.Tensor:
    return rref.local_value().square().sum()


def gradient_of(rref: RRef[torch.Tensor]) -> Any:
    return rref.local_value().grad


def test_calls_cost_no_weight(right: str, workers: list[str], rank: int) -> None:
    """However many go through one reference."""
    rref = rpc.remote(right, list)
    for i in range(50):
        rref.rpc_sync().append(i)
    futures = [rref.rpc_async().append(i) for i in range(50)]
    torch.futures.wait_all(futures)
    length = rref.remote().__len__()
    agree(length.to_here() == 100 and (rref.is_owner() or rref._weight[1] == WHOLE), rref)


def test_a_reference_lives_as_long_as_its_calls(right: str) -> None:
    """rpc.remote(...).rpc_async() of a reference that nobody keeps."""
    futures = [rpc.remote(right, list, ((i,),)).rpc_async().__len__() for i in range(30)]
    references = [rpc.remote(right, list, ((i,),)).remote().__len__() for i in range(30)]
    gc.collect()
    agree([f.wait() for f in futures] == [1] * 30 and [r.to_here() for r in references] == [1] * 30)


# -- a reference that is passed on and on: users make new units of weight, and the object is freed when the last user drops it


PASSES = 200  # three units
HALVES = WHOLE.bit_length() - 1  # of a unit


def unit(rref: Any) -> Any:
    """The unit of this worker's weight. The owner gives each reference a unit of its own."""
    return None if rref.is_owner() else rref._weight[0]


def hop(rref: Any, hops: int) -> set[Any]:
    """Passes the reference on to the next worker that does not own the object, and returns the units on the way."""
    names = [worker.name for worker in Agent.get().workers.all]
    others = [name for name in names if name != rref.owner_name()]
    after = others[(others.index(rpc.get_worker_info().name) + 1) % len(others)]
    return {unit(rref)} | (rpc.rpc_sync(after, hop, (rref, hops - 1)) if hops else set())


def outside(identity: Any) -> list[dict[Any, int]]:
    return [dict(entry.outside) for entry in Agent.get().objects.all() if entry.id == identity]


def is_freed(rref_id: Any, owner: str) -> bool:
    return rpc.rpc_sync(owner, outside, (rref_id,)) == []


def test_one_user_passes_it_on_often(right: str, workers: list[str], rank: int, size: int) -> None:
    rref: RRef[Any] | None = rpc.remote(right, list)
    units = {unit(rref)}
    for _ in range(PASSES):
        rpc.rpc_sync(workers[(rank + 2) % size], here_of, (rref,))
        units.add(unit(rref))
    identity, rref = rref._id, None
    gc.collect()
    agree(size == 1 or len(units) == 1 + PASSES // HALVES, units)
    agree(eventually(lambda: is_freed(identity, right)))


@pytest.mark.min_ranks(2)
def test_each_user_passes_it_on(right: str, workers: list[str]) -> None:
    """A chain: nobody keeps a reference for longer than the next call takes."""
    rref: RRef[Any] | None = rpc.remote(right, list)
    units = hop(rref, HALVES + 1)
    identity, rref = rref._id, None
    gc.collect()
    everyone("has passed it on")
    agree(len(units) == 2, units)
    agree(eventually(lambda: is_freed(identity, right)))


def test_parts_that_return_before_their_unit_is_known() -> None:
    """They keep the object, and nothing else does: its only user has one part of the first unit."""
    objects = OwnedObjects(0)
    entry = objects.entry((1, 0))
    entry.is_made = True
    objects.give(entry, ((1, 1), WHOLE))
    objects.take_back(entry, ((1, 1), WHOLE - 1))
    objects.take_back(entry, ((1, 2), WHOLE))  # the user has made this unit; then comes its notice, in two steps
    objects.take_back(entry, ((1, 1), 1))
    assert objects.all() == [entry]
    objects.give(entry, ((1, 2), WHOLE))
    assert objects.all() == []


def test_the_owner_learns_late_of_new_units(
    right: str, workers: list[str], rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have returned of them counts, and nothing is freed too early."""
    rref: RRef[Any] | None = rpc.remote(right, list)
    rref.to_here()
    identity = rref._id
    everyone(None)
    with monkeypatch.context() as patched:
        patched.setattr(Agent, "_tidy", lambda self: None)
        for _ in range(PASSES):
            rpc.rpc_sync(workers[(rank + 2) % size], here_of, (rref,))
        everyone(None)
    agree(size == 1 or len(rpc.rpc_sync(right, outside, (identity,))) == 1)
    agree(rref.to_here() == [])
    rref = None
    gc.collect()
    agree(eventually(lambda: is_freed(identity, right)))
