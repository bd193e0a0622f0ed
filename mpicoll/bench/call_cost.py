"""What a synchronous all_reduce costs through each door, beside the MPI call alone, measured in turn in one run.

mpi4py   comm.Allreduce(IN_PLACE, NumPy array)                  what there is without mpicoll
door 1   mpicoll.all_reduce(tensor)
door 2   torch.distributed.all_reduce(tensor), backend "mpi"
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed

import mpicoll
from mpicoll.mpi import reference

ROUND_S = 0.05  # seconds that one way is measured for, per round


def measure(sizes: Sequence[int], rounds: int, machine: str) -> None:
    """Prints a table on rank 0 (collective over the world, which it makes and destroys)."""
    mpicoll.init_process_group()
    rank, size = mpicoll.get_rank(), mpicoll.get_world_size()
    if rank == 0:
        print(f"all_reduce, float32, {size} ranks, {machine}; microseconds per call: median of {rounds} rounds [least, most];")
        print("a round's figure is the slowest rank's; x: median of the rounds' ratios to mpi4py")
        print(f"{'bytes':>9}  {'mpi4py':>24}  {'door 1':>24}  {'x':>5}  {'door 2':>24}  {'x':>5}")
    for nbytes in sizes:
        _row(nbytes, rounds)
    mpicoll.destroy_process_group()


def _row(nbytes: int, rounds: int) -> None:
    array = np.zeros(nbytes // 4, dtype=np.float32)
    tensor = torch.zeros(nbytes // 4)
    ways: list[Callable[[], object]] = [
        reference.all_reduce(array),
        lambda: mpicoll.all_reduce(tensor),
        lambda: torch.distributed.all_reduce(tensor),
    ]
    _check(array, tensor, ways)
    times: list[list[float]] = [[], [], []]
    count = _calls(ways[0])
    for _ in range(rounds):
        for way, series in zip(ways, times, strict=True):
            series.append(_seconds_per_call(way, count) * 1e6)
    if mpicoll.get_rank() == 0:
        cells = [f"{statistics.median(s):8.1f} [{min(s):6.1f},{max(s):6.1f}]" for s in times]
        ratios = [statistics.median(a / b for a, b in zip(s, times[0], strict=True)) for s in times]
        print(f"{nbytes:9d}  {cells[0]:>24}  {cells[1]:>24}  {ratios[1]:5.2f}  {cells[2]:>24}  {ratios[2]:5.2f}", flush=True)


def _check(array: np.ndarray, tensor: torch.Tensor, ways: Sequence[Callable[[], object]]) -> None:
    rank, size = mpicoll.get_rank(), mpicoll.get_world_size()
    for way, memory in zip(ways, (torch.from_numpy(array), tensor, tensor), strict=True):
        memory.fill_(rank + 1.0)
        way()
        if not torch.all(memory == size * (size + 1) / 2):
            raise AssertionError(f"wrong sum: {memory}")
        memory.zero_()


def _calls(way: Callable[[], object]) -> int:
    """Calls per round, the same on every rank."""
    for _ in range(20):
        way()
    began = time.perf_counter()
    for _ in range(20):
        way()
    count = torch.tensor(max(10.0, ROUND_S / ((time.perf_counter() - began) / 20)), dtype=torch.float64)
    mpicoll.broadcast(count, 0)
    return int(count)


def _seconds_per_call(way: Callable[[], object], count: int) -> float:
    for _ in range(5):
        way()
    mpicoll.barrier()
    began = time.perf_counter()
    for _ in range(count):
        way()
    slowest = torch.tensor((time.perf_counter() - began) / count, dtype=torch.float64)
    mpicoll.all_reduce(slowest, mpicoll.ReduceOp.MAX)
    return float(slowest)
