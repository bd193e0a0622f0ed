"""``signalling.py CASE``: windows whose ranks do not come, die, are on other nodes, or leave tensors registered."""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import torch

CASE = sys.argv[1]
if CASE == "serialized":
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
if CASE == "apart":
    os.environ["_MPICOLL_NODE_SIZE"] = "1"
if CASE == "checked":
    os.environ["MPICOLL_CHECK"] = "1"
SHORT = timedelta(seconds=1)

import mpicoll as dist  # noqa: E402


def say(text: object) -> None:
    print(f"{text}\n", end="", flush=True)


def told(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  shown to the test
        say(f"{type(error).__name__}: {error}")
    else:
        say("returned")


def exchange(rank: int, size: int) -> None:
    """A little of everything, in ordinary memory and in shared memory, which is mapped or not."""
    after, before = (rank + 1) % size, (rank - 1) % size
    for tensor in (torch.zeros(10), dist.empty_shared(10).zero_()):
        with dist.Window(tensor) as window:
            for async_op in (False, True):
                window.put(torch.full((3,), rank + 1.0), after, 2, async_op)
                window.signal(after, async_op)
                window.wait_signal(before, async_op).wait()
                copy = torch.empty(3)
                window.get(copy, before, 2, async_op).wait()
                window.fence()
                window.accumulate(torch.ones(1), 0, 9, async_op=async_op)
                window.fence()
            right = tensor[2:5].eq(before + 1).all() and copy.eq((before - 1) % size + 1).all() and tensor[9] in (0, 2 * size)
            say(f"rank {rank}: {'right' if right else (tensor, copy)}")


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if CASE in ("serialized", "checked"):
        exchange(rank, size)
    elif CASE == "apart":
        exchange(rank, size)
        with dist.Window(dist.empty_shared(3)) as window:
            if rank == 0:
                told(lambda: window.map_remote_tensor(1))
    elif CASE == "left":
        window = dist.Window(torch.zeros(3))
        window.put(torch.ones(3), (rank + 1) % size, async_op=True)
        say("end")
    elif CASE == "timeout":
        window = dist.Window(torch.zeros(3))
        if rank == 0:
            told(lambda: window.wait_signal(1, opts=SimpleNamespace(timeout=SHORT)))
        else:
            time.sleep(2.0)
        os._exit(0)
    elif CASE == "blocking":
        window = dist.Window(torch.zeros(3), dist.new_group(timeout=3 * SHORT))
        if rank == 0:
            window.wait_signal(1)
        time.sleep(60)
    elif CASE == "death":
        ordinary, window = dist.Window(torch.zeros(3)), dist.Window(dist.empty_shared(3).zero_())
        if rank == 2:
            told(lambda: ordinary.put(torch.ones(1), 0))
        window.put(torch.ones(1), (rank + 1) % size)
        window.fence()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            told(lambda: window.wait_signal(1))
            told(lambda: window.put(torch.ones(1), 1))
            told(lambda: window.signal(1))
        dist.shrink()
        with dist.Window(dist.empty_shared(3).zero_()) as window:
            window.put(torch.ones(1), 1 - dist.get_rank())
            window.fence()
            say(f"end: {window.tensor[0].item()}")


if __name__ == "__main__":
    main()
