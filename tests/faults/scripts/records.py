"""One rank of a job whose flight records are written, in the way that the first argument names."""

import asyncio
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import mpicoll as dist

caught: list[int] = []


def signalled(handler_before: bool, handler_after: bool) -> None:
    """Rank 1 sends SIGUSR2 to both ranks; rank 0 is blocked inside MPI, rank 1 sleeps. Then the job goes on."""
    if handler_before:
        signal.signal(signal.SIGUSR2, lambda number, _: caught.append(number))
    dist.init_process_group()
    if handler_after:
        signal.signal(signal.SIGUSR2, lambda number, _: caught.append(number))
    pids: list[Any] = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        time.sleep(0.5)
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        time.sleep(1.0)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2, 2, 2]
    assert caught == ([signal.SIGUSR2] if handler_before or handler_after else [])


def with_asyncio() -> None:
    """asyncio sets the wake-up descriptor of signals for itself. Both work."""

    async def until_signalled() -> None:
        arrived = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, arrived.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(arrived.wait(), 5)

    dist.init_process_group()
    asyncio.run(until_signalled())
    os.kill(os.getpid(), signal.SIGUSR2)
    until_written(f"rank-{dist.get_rank()}.json")


def in_a_forked_child() -> None:
    """The child ignores the signal, and cannot write over the record of its parent."""
    dist.init_process_group()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
        try:
            dist.dump_flight_record()
        except dist.ForkedProcess:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    time.sleep(0.5)
    assert not Path("mpicoll-dump").exists()


def expires() -> None:
    """Rank 0 is blocked in a collective that rank 1 never calls. The watchdog of rank 0 ends the job.

    The program has caught an error before, and has left the folder in which it was started.
    """
    dist.init_process_group()
    dist.group.WORLD.set_timeout(timedelta(seconds=2))  # which programs may need to start
    os.chdir("/")
    group = dist.new_group()
    if dist.get_rank() == 0:
        try:
            dist.irecv(torch.ones(1), 1, group=group).wait(timedelta(seconds=0.2))
        except dist.OperationTimeout:
            caught.append(1)
        assert caught == [1]
    dist.broadcast(torch.ones(4), 0)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    time.sleep(60)


def leaves() -> None:
    """Rank 1 ends its program early. Rank 0 asks it, and ends the job; rank 1 writes its record while it waits at its end."""
    dist.init_process_group(timeout=timedelta(seconds=20))
    for _ in range(3 - dist.get_rank()):
        dist.all_reduce(torch.ones(2))


def expires_in_wait() -> None:
    """Rank 0 catches the error of an asynchronous collective, and the job goes on with another group."""
    dist.init_process_group()
    group, other = dist.new_group(), dist.new_group()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        for _ in range(2):
            try:
                work.wait(timedelta(seconds=0.5))
            except dist.OperationTimeout:
                caught.append(1)
        assert len(caught) == 2
    dist.barrier(group=other)
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(2), group=group)


def requested() -> None:
    """Rank 0 touches the file; both ranks write their records while they are blocked or sleep."""
    dist.init_process_group()
    folder = Path(os.environ["MPICOLL_DUMP_DIR"])
    if dist.get_rank() == 0:
        folder.joinpath("request").touch()
    until_written(f"rank-{dist.get_rank()}.json", folder)
    dist.barrier()


def until_written(name: str, folder: Path = Path("mpicoll-dump")) -> None:
    deadline = time.monotonic() + 20
    while not (folder / name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.05)


WAYS = {
    "signal": lambda: signalled(False, False), "handler-before": lambda: signalled(True, False),
    "handler-after": lambda: signalled(False, True), "asyncio": with_asyncio, "fork": in_a_forked_child, "expires": expires,
    "expires-in-wait": expires_in_wait, "leaves": leaves, "requested": requested,
}  # fmt: skip
WAYS[sys.argv[1]]()
print(f"{sys.argv[1]}: done", flush=True)
