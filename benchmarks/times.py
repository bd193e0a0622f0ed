"""The time of each operation, for benchmarks/beside.py: microseconds of a call, as JSON in the file that is named (2 ranks).

Uses public names of mpicoll only, and nothing of this tree, so that it runs on other trees.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

import mpicoll

SIZE = 2
SERIES_S = 0.05  # of calls of one operation
SERIES = 7  # the fastest counts
MIB = 1 << 20


def measure() -> dict[str, float]:
    times = {}
    for name, call in operations().items():
        for _ in range(5):
            call()
        began = time.perf_counter()
        call()
        count = torch.tensor([max(1, min(2000, int(SERIES_S / max(1e-6, time.perf_counter() - began))))])
        mpicoll.broadcast(count, 0)
        series = []
        for _ in range(SERIES):
            mpicoll.barrier()
            began = time.perf_counter()
            for _ in range(int(count)):
                call()
            series.append((time.perf_counter() - began) / int(count))
        slowest = torch.tensor([min(series)], dtype=torch.float64)
        mpicoll.all_reduce(slowest, mpicoll.ReduceOp.MAX)
        times[name] = slowest.item() * 1e6
    return times


def operations() -> dict[str, Callable[[], object]]:
    """The calls by name, through the mpicoll API and through torch.distributed."""
    calls: dict[str, Callable[[], object]] = {}
    for suffix, dist in (("", mpicoll), (", torch", torch.distributed)):
        for nbytes in (8, MIB, 16 * MIB):
            calls |= {f"{name}{suffix}": call for name, call in of_size(dist, nbytes).items()}
    return calls


def of_size(dist: Any, nbytes: int) -> dict[str, Callable[[], object]]:
    rank, peer, size = dist.get_rank(), 1 - dist.get_rank(), SIZE
    x, y = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4)
    wide, half = torch.zeros(nbytes // 4 * size), torch.zeros(nbytes // 2, dtype=torch.bfloat16)
    parts, sources = list(torch.zeros(nbytes // 4 * size).chunk(size)), list(torch.zeros(nbytes // 4 * size).chunk(size))
    strided = torch.zeros(nbytes // 4, 2)[:, 0]

    def send_recv() -> None:
        for step in (rank, 1 - rank):
            if step == 0:
                dist.send(x, peer)
            else:
                dist.recv(y, peer)

    def exchange() -> None:
        for work in [dist.isend(x, peer), dist.irecv(y, peer)]:
            work.wait()

    label = "8 B" if nbytes == 8 else f"{nbytes // MIB} MiB"
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce, bfloat16": lambda: dist.all_reduce(half),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(parts, x),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, wide),
        "gather": lambda: dist.gather(x, parts if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(x, sources if rank == 0 else None, 0),
        "all_to_all": lambda: dist.all_to_all(parts, sources),
        "all_to_all_single": lambda: dist.all_to_all_single(x, y),
        "send + recv, both ways": send_recv,
        "isend + irecv + waits": exchange,
    }
    if nbytes == 8:
        quarter = torch.zeros(nbytes // 4, dtype=torch.bfloat16)
        calls |= {
            "all_reduce, MAX": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
            "all_reduce, asynchronous": lambda: dist.all_reduce(x, async_op=True).wait(),
            "all_reduce, strided": lambda: dist.all_reduce(strided),
            "reduce_scatter_tensor, bfloat16": lambda: dist.reduce_scatter_tensor(quarter, half),
            "barrier": dist.barrier,
        }
    return {f"{name}, {label}": call for name, call in calls.items()}


mpicoll.init_process_group()
torch.set_num_threads(1)
found = measure()
if mpicoll.get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps({"from": mpicoll.__file__, "times": found}))
mpicoll.destroy_process_group()
