"""python losing.py CASE under mpirun --with-ft ulfm: ranks die, the others say what they get, shrink and go on."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist
from mpicoll._c10d import rendezvous
from mpicoll._mpi import runtime

LIMIT_S = 5.0  # 0.1 s on an idle machine


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def say(text: object) -> None:
    print(f"{text}\n", end="", flush=True)


def expect_lost(operation: str, call: Callable[[], object], ranks: tuple[int, ...]) -> None:
    """Says whether ``call`` raised PeerLost, with these ranks, in time."""
    since = time.monotonic()
    try:
        call()
    except dist.PeerLost as error:
        took_s = time.monotonic() - since
        right = error.ranks == ranks and took_s < LIMIT_S and operation in str(error)
        say(f"{operation}: lost" if right else f"{operation}: {error.ranks} after {took_s:.2f} s: {error}")
    else:
        say(f"{operation}: no error")


def check_world(size: int) -> None:
    """Uses a world of ``size`` ranks: small, large, objects, a new group, messages."""
    rank = dist.get_rank()
    for count in (1, 1 << 18):
        total = torch.ones(count)
        dist.all_reduce(total)
        right = total[-1].item() == size == dist.get_world_size()
        if not right:
            say(f"wrong sum in a world of {dist.get_world_size()}")
    names = [None] * size
    dist.all_gather_object(names, rank)
    group = dist.new_group(list(reversed(range(size))))
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    work.wait()
    if size > 1:
        token = torch.zeros(1)
        sent = dist.isend(torch.ones(1), (rank + 1) % size)
        dist.recv(token, (rank - 1) % size)
        sent.wait()
    dist.barrier()
    say(f"world of {size}: {names}")


def operations() -> None:
    """Of 4 ranks rank 1 dies while the others are in many operations; then rank 0 of the new world does."""
    dist.init_process_group()
    rank = dist.get_rank()
    groups = [dist.new_group() for _ in range(4)]
    apart = dist.new_group([2, 3])
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        die()
    small = torch.ones(4)
    works: dict[str, Any] = {
        "all_reduce": dist.all_reduce(torch.ones(4), group=groups[0], async_op=True),
        "broadcast": dist.broadcast(torch.ones(4), 1, group=groups[1], async_op=True),
        "irecv": dist.irecv(torch.ones(4), 1, tag=1),
        "isend": dist.isend(torch.ones(1 << 22), 1, tag=2),
    }
    blocking: dict[int, tuple[str, Callable[[], object]]] = {
        0: ("recv", lambda: dist.recv(small, 2, tag=3)),  # from a rank that lives
        2: ("all_reduce", lambda: dist.all_reduce(torch.ones(1 << 20), group=groups[2])),  # in shared memory
        3: ("barrier", lambda: dist.barrier(group=groups[3])),
    }
    expect_lost(*blocking[rank], (1,))
    for operation, work in works.items():
        expect_lost(operation, work.wait, (1,))
    expect_lost("all_reduce", lambda: dist.all_reduce(small), (1,))
    if rank >= 2:
        dist.all_reduce(small, group=apart)  # has lost nobody
    dist.shrink()
    check_world(3)
    if dist.get_rank() == 0:  # which has the store
        die()
    expect_lost("recv", lambda: dist.recv(small), (0,))
    dist.destroy_process_group()
    dist.init_process_group()
    check_world(2)
    say("end")


def training() -> None:
    """Of 3 ranks rank 1 dies in a backward pass, through torch.distributed; torch's shrink_group goes on."""
    torch.distributed.init_process_group("mpi")
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    for step in range(4):
        loss = model(torch.ones(2, 8)).sum()
        if torch.distributed.get_rank() == 1 and step == 2:
            die()
        if step == 2:
            expect_lost("all_reduce", loss.backward, (1,))
            break
        loss.backward()
    shrink_group = getattr(torch.distributed, "shrink_group", dist.shrink_group)  # torch has it from 2.13 on
    shrink_group([1])
    DistributedDataParallel(torch.nn.Linear(8, 8))(torch.ones(2, 8)).sum().backward()
    check_world(2)
    pair = torch.distributed.new_group([0, 1])
    say(f"group of {shrink_group([0], pair).size()}" if torch.distributed.get_rank() == 1 else "waits")
    torch.distributed.barrier()
    say("end")


def endings() -> None:
    """Of 4 ranks one after the other ends: by an exception, by os._exit."""
    dist.init_process_group()
    for size in (4, 3):
        if dist.get_rank() == 1:
            if size == 4:
                raise ZeroDivisionError("the words of the rank that fails")
            os._exit(5)
        expect_lost("all_reduce", lambda: dist.all_reduce(torch.ones(4)), (1,))
        dist.shrink()
        check_world(size - 1)
    say("end")


def leaving() -> None:
    """Of 3 ranks one ends its program while the others wait for it."""
    dist.init_process_group()
    if dist.get_rank() == 2:
        sys.exit(3)
    try:
        dist.all_reduce(torch.ones(4))
    except dist.PeerLost as error:
        say(f"all_reduce: lost {error.ranks}")
    dist.shrink()
    check_world(2)
    say("end")


def several(first: str, delay: str) -> None:
    """Of 4 ranks rank 1 dies, and another one ``delay`` seconds later: at once, or while the others shrink."""
    dist.init_process_group()
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == int(first):
        threading.Timer(float(delay), die).start()
    if dist.get_rank() == 1:
        die()
    while dist.get_world_size() > 2:
        try:
            dist.all_reduce(torch.ones(4))
            dist.barrier()
            time.sleep(0.5)
        except dist.PeerLost:
            dist.shrink()
    check_world(2)
    say("end")


def store() -> None:
    """Of 4 ranks rank 1 dies, and rank 0 when it has just opened the store of the new world: nobody can connect to it."""
    dist.init_process_group()
    if dist.get_rank() == 1:
        die()
    opens, connects = rendezvous._open, rendezvous._connect

    def open_and_die(*arguments: Any) -> Any:
        threading.Timer(0.2, die).start()
        return opens(*arguments)

    def connect_too_late(*arguments: Any) -> Any:
        rendezvous._connect = connects
        time.sleep(0.6)
        return connects(*arguments)

    rendezvous._connect = connect_too_late
    if dist.get_rank() == 0:
        rendezvous._open = open_and_die
    expect_lost("all_reduce", lambda: dist.all_reduce(torch.ones(4)), (1,))
    dist.shrink()
    check_world(2)
    say("end")


def noticed() -> None:
    """Of 4 ranks rank 1 dies, and rank 0 while the new world is made; one of the others notices it before it begins to."""
    dist.init_process_group()
    rank = dist.get_rank()
    if rank == 1:
        die()
    starts = runtime.start

    def start_late(*arguments: Any, **more: Any) -> Any:
        if rank == 0:
            die()
        started = starts(*arguments, **more)
        if rank == 3:
            runtime.start = starts
            time.sleep(0.5)
        return started

    expect_lost("all_reduce", lambda: dist.all_reduce(torch.ones(4)), (1,))
    runtime.start = start_late
    dist.shrink()
    check_world(2)
    say("end")


def results() -> None:
    """Ranks die one after the other while the others call collectives: no result is wrong."""
    dist.init_process_group()
    while (size := dist.get_world_size()) > 2:
        rank = dist.get_rank()
        if rank == 1:
            threading.Timer(0.05, die).start()
        try:
            while True:
                for count in (1, 3000):  # windows are made in the second round: a rank may die in that, too
                    for operation, got, expected in collectives(rank, size, count):
                        if not torch.equal(got, expected):
                            say(f"wrong: {operation} of {count}: {got.tolist()[:10]}")
        except dist.PeerLost as error:
            say(f"lost {error.ranks} of {size}")
        dist.shrink()
    say("end")


def reconfigured() -> None:
    """Of 4 ranks rank 1 dies; two of the others go on alone, the last one comes back, and another one dies."""
    dist.init_process_group()
    rank, store, started = dist.get_rank(), torch.distributed.distributed_c10d._get_default_store(), runtime.start
    store.set(str(rank), dist.get_reconfigure_handle())
    handles = [store.get(str(each)).decode() for each in range(4)]

    def reconfigure(uuid: int, *ranks: int) -> None:
        dist.reconfigure(uuid, [handles[each] for each in ranks])

    reconfigure(1, 0, 1, 2, 3)
    if rank == 1:
        die()
    expect_lost("all_reduce", lambda: dist.all_reduce(torch.ones(4)), (1,))
    expect_lost("reconfigure", lambda: reconfigure(2, 0, 1, 2, 3), (1,))
    if rank != 3:
        reconfigure(3, 2, 0)
        check_world(2)
    reconfigure(4, 3, 0, 2)
    check_world(3)
    if rank == 0:
        runtime.start = lambda *arguments, **more: die() if more.get("own") else started(*arguments, **more)
    expect_lost("reconfigure", lambda: reconfigure(5, 0, 2, 3), (0, 1))
    reconfigure(6, 2, 3)
    check_world(2)
    dist.shrink()  # nobody is lost
    check_world(2)
    say("end")


def remade(times: str) -> None:
    """Nobody dies. The watchdog looks while communicators are made."""
    dist.init_process_group()
    handles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(handles, dist.get_reconfigure_handle())
    for uuid in range(int(times)):
        dist.reconfigure(uuid, handles)
    say("end")


def collectives(rank: int, size: int, count: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Calls one after the other: its name, what came, and what should have."""

    def block(value: float, count: int = count) -> torch.Tensor:
        return torch.full((count,), float(value))

    total, of_all = block(sum(range(size))), torch.arange(float(size)).repeat_interleave(count)
    uneven = [block(each, count + each) for each in range(size)]
    parts = [block(-1, count + each) for each in range(size)]
    dist.all_gather(parts, uneven[rank])
    yield "all_gather, uneven", torch.cat(parts), torch.cat(uneven)
    whole = block(-1, size * count)
    dist.all_gather_into_tensor(whole, block(rank))
    yield "all_gather_into_tensor", whole, of_all
    summed = block(rank)
    dist.all_reduce(summed)
    yield "all_reduce", summed, total
    share = block(-1)
    dist.reduce_scatter_tensor(share, block(rank, size * count))
    yield "reduce_scatter_tensor", share, total
    received = block(-1, size * count)
    dist.all_to_all_single(received, block(rank, size * count))
    yield "all_to_all_single", received, of_all
    value = block(rank)
    dist.broadcast(value, size - 1)
    yield "broadcast", value, block(size - 1)
    gathered = [block(-1) for _ in range(size)]
    dist.gather(block(rank), gathered if rank == 0 else None)
    yield "gather", torch.cat(gathered), of_all if rank == 0 else block(-1, size * count)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
