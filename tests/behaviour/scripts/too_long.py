"""Two ranks: every receive is shorter than its message, and what lies behind it must stay as it was.

too_long.py [first] [mpi4py] [torch]    first: import torch before all others; mpi4py: import mpi4py.MPI before mpicoll;
                                        torch: the same once more through torch.distributed
"""

import sys
from collections.abc import Callable
from typing import Any

if "first" in sys.argv:
    import torch
if "mpi4py" in sys.argv:
    import mpi4py.MPI  # noqa: F401  it starts MPI

import pytest
import torch
from torch import Tensor

import mpicoll
from mpicoll._mpi import runtime
from mpicoll.errors import TruncationError

dist: Any = mpicoll  # and torch.distributed
SIZES = (64, 2_000, 4 << 10, 100_000, 1 << 20, 4 << 20)  # bytes


def receives(front: Tensor, src: int) -> dict[str, Callable[[], object]]:
    """Every way to receive a message, from another rank and from this one."""
    immediate: dict[str, Callable[[], object]] = {
        "irecv": lambda: dist.irecv(front, src).wait(),
        "irecv from anybody": lambda: dist.irecv(front).wait(),
        "irecv, polled": lambda: polled(dist.irecv(front, src)),
        "batch_isend_irecv": lambda: [w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.irecv, front, src)])],
    }
    if src == dist.get_rank():
        return immediate
    return {"recv": lambda: dist.recv(front, src), "recv from anybody": lambda: dist.recv(front), **immediate}


def polled(work: Any) -> None:
    while not work.is_completed():
        pass
    work.wait()


def refuses(what: str, call: Callable[[], object], room: Tensor, front: Tensor) -> None:
    """``call`` receives into ``front``, the first half of ``room``; the message has the size of ``room``."""
    room.zero_()
    with pytest.raises(TruncationError, match=what if what in ("gather", "scatter") else f"of {front.nbytes} bytes"):
        call()
    assert not room[len(front) :].any(), f"{what}, {room.nbytes} bytes into {front.nbytes}: written beyond the tensor"


def messages(nbytes: int) -> None:
    rank = dist.get_rank()
    room, message = torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    front = room[: nbytes // 2]
    for what, receive in receives(front, rank).items():
        work = dist.isend(message, rank)
        refuses(f"{what}, to itself", receive, room, front)
        work.wait()
    dist.barrier()  # a receive from anybody must not find what the other rank sends next
    for sender in range(2):
        for what, receive in receives(front, sender).items() if rank != sender else ():
            refuses(what, receive, room, front)
        for _ in receives(front, 1 - rank) if rank == sender else ():
            dist.send(message, 1 - rank)
    exact = torch.zeros(nbytes, dtype=torch.uint8)  # the group works on
    works = [dist.irecv(exact, 1 - rank), dist.isend(message, 1 - rank)]
    assert all(work.wait() for work in works)
    assert torch.equal(exact, message)


def exchanges(nbytes: int) -> None:
    """Collectives that are messages between pairs. The group is unusable afterwards, on the rank that was sent too much."""
    rank = dist.get_rank()
    room, message = torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    front = room[: nbytes // 2]
    own = torch.zeros(nbytes, dtype=torch.uint8)
    one, other = dist.new_group(), dist.new_group()
    if rank == 0:
        refuses("gather", lambda: dist.gather(message, [own, front], 0, group=one), room, front)
        dist.scatter(own, [own, message], 0, group=other)
    else:
        dist.gather(message, None, 0, group=one)
        refuses("scatter", lambda: dist.scatter(front, None, 0, group=other), room, front)


mpicoll.init_process_group()
for dist in (mpicoll, torch.distributed)[: 1 + ("torch" in sys.argv)]:
    for size in SIZES:
        messages(size)
        exchanges(size)
        dist.barrier()
print(f"rank {mpicoll.get_rank()}: all refused, matched first: {runtime.current().overruns}", flush=True)  # type: ignore[union-attr]
mpicoll.destroy_process_group()
