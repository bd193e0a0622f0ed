"""Rank 1 does something else than the others. Arguments: how, and the timeout of the group in seconds."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch

import mpicoll
import mpicoll as dist
from mpicoll._base.waits import LOOK_S, PATIENCE_S

how, timeout_s = sys.argv[1], float(sys.argv[2])
dist.init_process_group()
dist.group.WORLD.set_timeout(timedelta(seconds=timeout_s))  # which programs may need to start
rank = dist.get_rank()
api = torch.distributed if how.startswith("torch ") else mpicoll
tensor, large = torch.ones(2), torch.ones(1 << 18)
for _ in range(100):
    api.all_reduce(tensor)


class Late(Exception):
    """Raised by a handler of a signal."""


def late(*_: object) -> None:
    raise Late


def leave() -> None:
    """An alarm goes off in a large all_reduce that the other rank comes to later. The program catches what it raises."""
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        dist.all_reduce(large)
    except Late:
        print("caught\n", end="", flush=True)
    try:
        dist.barrier()
    except dist.GroupFailed as error:
        print(f"{error}\n", end="", flush=True)


def program_of_rank_1() -> None:
    if how == "leaves":
        leave()
    if how == "ends its process":
        os._exit(0)
    if how == "stops":
        time.sleep(2 * LOOK_S)  # until its last call is known
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


if "other collective" in how:
    if rank == 1:
        api.broadcast(tensor, 1)
    else:
        api.all_reduce(tensor)
    time.sleep(10)
elif how == "refuses and goes on":
    try:
        dist.all_reduce([tensor] if rank == 1 else tensor)  # type: ignore[arg-type]
    except TypeError:
        dist.barrier()
    time.sleep(10)
elif how == "receives too little":
    try:
        dist.broadcast(torch.ones(4 if rank == 0 else 2), 0)
    except dist.CommunicationError as error:
        print(f"caught {error}\n", end="", flush=True)
    time.sleep(20)
elif how == "goes on":
    if rank == 1:
        time.sleep(3 * PATIENCE_S)  # it comes late
    dist.all_reduce(tensor)
    try:
        dist.reduce(tensor, 7 + rank)
    except ValueError:
        print("caught\n", end="", flush=True)
    tensor.fill_(rank)
    dist.broadcast(tensor, 1)
    print(f"survived with {tensor.tolist()}\n", end="", flush=True)
elif how == "meets a barrier":
    dist.barrier() if rank == 0 else dist.all_gather([torch.empty(2), torch.empty(2)], tensor)
    dist.all_reduce(tensor)
elif rank == 1:
    program_of_rank_1()
elif how == "leaves":
    time.sleep(0.7)
    print(f"began {time.time()}\n", end="", flush=True)
    dist.all_reduce(large)
    dist.all_reduce(large)
elif how == "sends nothing":
    dist.recv(tensor, 1)
elif how == "sends nothing to irecv":
    work = dist.irecv(tensor, 1)
    assert work is not None
    work.wait()
elif how == "misses an asynchronous one":
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
else:
    dist.barrier() if how == "misses a barrier" else dist.all_reduce(tensor)
