"""``failing.py DOOR FAULT FOLDER LIMIT``: the last rank fails in mid-job, while the ranks call one all_reduce after the other.

FAULT: a statement. LIMIT: of the group, in seconds. The ranks write to FOLDER: their processes and shared memory when all of them
are ready, when the fault is, and which sums were wrong.
"""

import os
import signal  # noqa: F401  a FAULT may send one
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import mpicoll

DOOR, FAULT, FOLDER, LIMIT_S = sys.argv[1], sys.argv[2], Path(sys.argv[3]), float(sys.argv[4])
api: Any = mpicoll if DOOR == "mpicoll" else torch.distributed
api.init_process_group("mpi")
group = api.new_group(timeout=timedelta(seconds=LIMIT_S))
RANK, RANKS = api.get_rank(), api.get_world_size()


def write(name: str, *words: object) -> None:
    hidden = FOLDER / f".{name}"
    hidden.write_text(" ".join(map(str, words)))
    hidden.rename(FOLDER / name)


def fail() -> None:
    write("fault", time.time())
    exec(FAULT)


step = 0
while True:
    if step == 20:
        maps = Path("/proc/self/maps").read_text().splitlines()
        memory = {line.split()[-1] for line in maps if "/dev/shm/" in line and "(deleted)" not in line}
        write(f"memory-{RANK}", *memory)
        write(f"pids-{RANK}", os.getpid(), os.getppid())  # of the rank and of its monitor
        api.barrier(group)
    if step == 40 and RANK == RANKS - 1:
        fail()
    for count in (2, 1 << 19):
        tensor = torch.full((count,), RANK + step)
        api.all_reduce(tensor, group=group)
        if not tensor.eq(RANKS * (RANKS - 1) // 2 + RANKS * step).all():
            write(f"wrong-{RANK}", step, count)
    step += 1
