"""python failures.py CASE on 2 or more ranks: rank 1 fails in the way of the case, the others wait for it.

Nobody prints "survived" who should not: a rank that goes on where the job should have ended says so.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch

import mpicoll as dist
from mpicoll._base.waits import PATIENCE_S

CULPRIT = 1
LONG_S = 100.0  # longer than any test waits


def a_reduction() -> None:
    """Rank 1 has done its part and may leave; rank 2 is late, which is nobody's fault."""
    time.sleep(2.7 * PATIENCE_S if dist.get_rank() == 2 else 0)
    dist.reduce(torch.ones(1), 0)
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 2)
    else:
        dist.send(torch.zeros(1), 0)


WAITS: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "all_reduce async": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "recv": lambda: dist.recv(torch.zeros(1), CULPRIT),
    "recv from anybody": lambda: dist.recv(torch.zeros(1)),
    "barrier": dist.barrier,
    "new_group": dist.new_group,
    "reduce": a_reduction,
}


def wait_in(operation: str) -> None:
    if operation != "exit":
        WAITS[operation]()
        print(f"rank {dist.get_rank()} survived {operation}", flush=True)


def fail_by(way: str) -> None:
    if way == "exception":
        raise ZeroDivisionError("the culprit's own words")
    if way == "import":
        import no_such_module  # noqa: F401
    if way.startswith("sys.exit"):
        sys.exit(int(way.removeprefix("sys.exit(").removesuffix(")")))
    if way == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if way == "reduce":
        dist.reduce(torch.ones(1), 0)
    elif way == "destroy":
        dist.destroy_process_group()
    else:
        if way == "thread":
            threading.Thread(target=fail_by, args=("exception",)).start()
        if way == "interrupt":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(LONG_S)


def main(way: str, operation: str, timeout_s: str = "1800") -> None:
    dist.init_process_group()
    dist.group.WORLD.set_timeout(timedelta(seconds=float(timeout_s)))  # which programs may need to start
    dist.all_reduce(torch.ones(1))
    action: Callable[[str], None] = fail_by if dist.get_rank() == CULPRIT else wait_in
    action(way if dist.get_rank() == CULPRIT else operation)


if __name__ == "__main__":
    main(*sys.argv[1:])
