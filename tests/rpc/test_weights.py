"""A reference that is passed on and on: its weight stays a short number, and the object is freed when the last user drops it."""

from __future__ import annotations

import gc
import weakref
from fractions import Fraction
from typing import Any

import pytest

from mpicoll import rpc
from mpicoll.rpc import current_agent
from mpicoll.rpc.rref import LARGEST_DENOMINATOR, RRef
from mpicoll.rpc.service import Pool
from tests.support import agree, eventually, everyone

PASSES = 1000
MANY_BITS = 4 * LARGEST_DENOMINATOR.bit_length()  # what is passed on before the owner has answered may exceed it


def bits(rref: Any) -> int:
    """Of the weight that has arrived with this reference, or that it has been given since."""
    return 0 if rref.is_owner() else int(rref._weight.denominator.bit_length())


def hop(rref: Any, hops: int) -> int:
    """Passes the reference on to the next worker that does not own the object, and returns the longest weight on the way."""
    names = [worker.name for worker in current_agent.get().workers.all]
    others = [name for name in names if name != rref.owner_name()]
    after = others[(others.index(rpc.get_worker_info().name) + 1) % len(others)]
    return max(bits(rref), rpc.rpc_sync(after, hop, (rref, hops - 1)) if hops else 0)


def outside(identity: Any) -> list[Fraction]:
    return [entry.outside for entry in current_agent.get().objects.all() if entry.id == identity]


def is_freed(rref_id: Any, owner: str) -> bool:
    return rpc.rpc_sync(owner, outside, (rref_id,)) == []


def test_one_user_passes_it_on_often(right: str, workers: list[str], rank: int, size: int) -> None:
    rref: RRef[Any] | None = rpc.remote(right, list)
    longest = []
    for _ in range(PASSES):
        rpc.rpc_sync(workers[(rank + 2) % size], bits, (rref,))
        longest.append(bits(rref))
    identity, rref = rref._id, None
    gc.collect()
    agree(size == 1 or max(longest) < MANY_BITS, max(longest))
    agree(eventually(lambda: is_freed(identity, right)))


@pytest.mark.min_ranks(2)  # the owner gives each reference a weight of its own
def test_each_user_passes_it_on(right: str, workers: list[str]) -> None:
    """A chain: nobody keeps a reference for longer than the next call takes."""
    rref: RRef[Any] | None = rpc.remote(right, list)
    longest = 0
    for _ in range(8):
        longest = max(longest, hop(rref, 20))
    identity, rref = rref._id, None
    gc.collect()
    everyone("has passed it on")
    agree(longest < MANY_BITS, longest)
    agree(eventually(lambda: is_freed(identity, right)))


def test_while_the_owner_does_not_answer(
    right: str, workers: list[str], rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passing on does not wait, the long weight travels, and nothing is freed too early."""
    rref: RRef[Any] | None = rpc.remote(right, list)
    rref.to_here()
    with monkeypatch.context() as patched:
        patched.setattr(RRef, "_renew", lambda self: None)
        for _ in range(PASSES):
            rpc.rpc_sync(workers[(rank + 2) % size], bits, (rref,))
        everyone("has passed it on")
    agree(size == 1 or bits(rref) > PASSES, bits(rref))
    if size > 1:
        renewed = rref._renew()
        assert renewed is not None
        renewed.wait()
    agree(eventually(lambda: bits(rref) < MANY_BITS) and rref.to_here() == [], bits(rref))
    identity, rref = rref._id, None
    gc.collect()
    agree(eventually(lambda: is_freed(identity, right)))


class Callback:
    def __call__(self) -> None: ...


def test_an_idle_thread_keeps_nothing() -> None:
    """What it ran may hold the last reference to an object."""
    pool = Pool(1)
    for _ in range(2):  # by a new thread, and by an idle one
        ran = Callback()
        gone = weakref.ref(ran)
        pool.submit(ran)
        del ran
        assert eventually(lambda: pool.idle() == 1)
        assert eventually(lambda gone=gone: gone() is None)  # type: ignore[misc]
    pool.close()
