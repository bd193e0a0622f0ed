"""Times what a rank does in the window with one thread of torch and with several: ``python -m benchmarks.threads 2 4 8``.

    copy       of the memory of a chunk
    float32    the sum of two chunks into a third
    bfloat16   the same

One process, without MPI's communication. The numbers of threads alternate; it prints the least time of each in microseconds, and
its part of the time of one thread. `tests/gpu/run.py` measures an all_reduce of ranks with threads, on a machine with 16 cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ReduceOp

from mpicoll._algorithms import blocks
from mpicoll._algorithms.window import memmove
from mpicoll._tensors import combine
from mpicoll.bench import options
from mpicoll.bench.formulas import parse, spell

SIZES = ("64KiB", "256KiB", "512KiB", "1MiB", "4MiB", "64MiB")
ROUND_S = 0.01
Call = Callable[[], object]


def calls(nbytes: int, threads: int) -> dict[str, Call]:
    """What a rank with so many threads calls, by name. Checks each result."""
    source, target = torch.arange(nbytes, dtype=torch.float64).to(torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    by = memmove if threads == 1 else blocks.copy
    found: dict[str, Call] = {"copy": lambda: (source, by(target.data_ptr(), source.data_ptr(), nbytes))}
    found["copy"]()
    assert torch.equal(source, target)
    for dtype in (torch.float32, torch.bfloat16):
        found[str(dtype).removeprefix("torch.")] = added(nbytes // dtype.itemsize, dtype)
    return found


def added(count: int, dtype: torch.dtype) -> Call:
    kernel, out = combine.TABLE[dtype, ReduceOp.SUM].combine, torch.zeros(count, dtype=dtype)
    parts = [torch.full((count,), value, dtype=dtype) for value in (1.0, 2.0)]
    kernel(parts, out)
    assert bool((out == 3).all())
    return lambda: kernel(parts, out)


def least_us(nbytes: int, threads: Sequence[int], rounds: int) -> dict[str, dict[int, float]]:
    """The least time of a call by name and number of threads."""
    found: dict[str, dict[int, float]] = {}
    by_threads: dict[int, dict[str, Call]] = {}
    for number in threads:
        torch.set_num_threads(number)
        by_threads[number] = calls(nbytes, number)
    for _ in range(rounds):
        for number, each in by_threads.items():
            torch.set_num_threads(number)
            for name, call in each.items():
                times = found.setdefault(name, dict.fromkeys(threads, float("inf")))
                times[number] = min(times[number], timed_us(call))
    return found


def timed_us(call: Call) -> float:
    """The least time of the calls of one round. The first one, which wakes the threads, is not it."""
    least_s, end = float("inf"), time.perf_counter() + ROUND_S
    while time.perf_counter() < end or least_s == float("inf"):
        began = time.perf_counter()
        call()
        least_s = min(least_s, time.perf_counter() - began)
    return least_s * 1e6


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.threads", description=__doc__.split("\n")[0])
    parser.add_argument("threads", type=options.count, nargs="+", help="2 4 8 ...")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="S")
    parser.add_argument("--rounds", type=options.count, default=50, metavar="N", help="default 50")
    args = parser.parse_args(words)
    numbers = [1, *args.threads]
    print(f"{'':20}" + "".join(f"{f'{number} threads':>22}" for number in numbers))
    for size in args.sizes:
        for name, times in least_us(parse(size), numbers, args.rounds).items():
            cells = (f"{times[number]:12.1f} us {times[number] / times[1]:5.2f} " for number in numbers)
            print(f"{spell(parse(size)):>8}  {name:10}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
