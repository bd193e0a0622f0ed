"""Random operations of both doors against a one-process oracle.

    python -m mpicoll.run -n 4 -m tests.behaviour.random_operations --count 100000 --seed 7 [--stalls]

A round has 1 to 8 operations, now and then 200. All ranks draw the same ones from (seed, round), and each rank computes the
inputs of all ranks, so that it knows every result. Asynchronous operations are waited for at the end of the round, in an order
of each rank's own. A failure prints the command that repeats its round. Memory, descriptors and threads are compared after the
first half and at the end. With --stalls each rank's process is stopped now and then, up to 4 s: no rank may be accused.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import inspect
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mpicoll
from tests.behaviour.random_cases import COMPLEX, DTYPES, OPERATIONS, POOL, Case

STALLER = """
import os, random, signal, sys, time
rank, own = int(sys.argv[1]), random.Random(sys.argv[2])
while os.getppid() == rank:
    time.sleep(own.uniform(0, 4))
    os.kill(rank, signal.SIGSTOP)
    time.sleep(own.choice([0.01, 0.2, 1.5, 4]))
    os.kill(rank, signal.SIGCONT)
"""
USUAL, MOST = 8, 200  # operations of a round
MEMORY = 16 << 20  # bytes by which a process may grow in the second half: each group remembers its last calls


class Group(NamedTuple):
    ranks: list[int]
    handle: Any  # None: this rank is not a member


class Resources(NamedTuple):
    """What must not grow."""

    memory: int
    files: int
    threads: int

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free but fragmented
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        private = int(status["RssAnon"].split()[0]) << 10  # windows are shared, and their pages come into use one by one
        return cls(private, len(os.listdir("/proc/self/fd")), threading.active_count())

    def growth_since(self, before: Resources) -> str:
        grown = self.memory > before.memory + MEMORY or self.files > before.files or self.threads > before.threads
        return f"resources grew from {before} to {self}" if grown else ""


class Run:
    """The operations of one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rank, self.size = mpicoll.get_rank(), mpicoll.get_world_size()
        everybody = list(range(self.size))
        several = [everybody, everybody, everybody[:-1] or everybody, everybody[1:] or everybody, everybody[::2]]
        self.groups = [Group(everybody, mpicoll.group.WORLD)]
        for ranks in [*several[1:], *([rank] for rank in everybody)]:
            handle = mpicoll.new_group(ranks)
            self.groups.append(Group(ranks, handle if self.rank in ranks else None))
        if "sort_ranks" in inspect.signature(mpicoll.new_group).parameters:  # torch >= 2.13
            self.groups.append(Group(everybody[::-1], mpicoll.new_group(everybody[::-1], sort_ranks=False)))
        values = torch.randint(-2, 3, (POOL,), generator=torch.Generator().manual_seed(seed), device="cpu")
        self.pools = {dtype: values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype) for dtype in DTYPES}
        for dtype in COMPLEX:
            self.pools[dtype] = torch.complex(values.double(), values.flip(0).double()).to(dtype)

    def warm_up(self) -> None:
        """Makes what a group makes on first use: its thread and its window."""
        for _, handle in self.groups:
            if handle is not None:
                mpicoll.all_reduce(torch.ones(1 << 19, device="cpu"), group=handle, async_op=True).wait()

    def round(self, number: int) -> int:
        """Returns the number of its operations.

        Raises:
            AssertionError: A result is wrong.
        """
        plan, own = random.Random(f"{self.seed} {number}"), random.Random(f"{self.seed} {number} {self.rank}")
        count = MOST if number % 50 == 3 else plan.randint(1, USUAL)
        waits: list[Callable[[], None]] = []
        for index in range(count):
            seed, group, operation = plan.random(), plan.choice(self.groups), plan.choice(OPERATIONS)
            if group.handle is None:
                continue
            place = group.ranks.index(self.rank)
            case = Case(random.Random(seed), own, self.pools, group.ranks, group.handle, place, MOST * number + index)
            self._begin(number, operation, case, waits)
        own.shuffle(waits)
        for wait in waits:
            wait()
        return count

    def _begin(self, number: int, operation: Callable[[Case], Any], case: Case, waits: list[Callable[[], None]]) -> None:
        """Starts an operation. Checks its result, or adds to ``waits`` what waits for it and checks."""

        def attempt(function: Callable[[], Any]) -> Any:
            try:
                return function()
            except Exception:
                print(self._description(number, operation, case), file=sys.stderr, flush=True)
                raise

        def check() -> None:
            for work in works:
                work.wait()
            wrong = [placed for placed in case.placed if not placed.right()]
            assert not case.words, case.words
            assert not wrong, f"{len(wrong)} of {len(case.placed)} tensors are wrong"

        started = attempt(lambda: operation(case))
        works = [work for work in (started if isinstance(started, list) else [started]) if work is not None]
        case.own.shuffle(works)
        if works:
            waits.append(lambda: attempt(check))
        else:
            attempt(check)

    def _description(self, number: int, operation: Callable[[Case], Any], case: Case) -> str:
        tensors = [f"{tuple(p.tensor.shape)} strides {p.tensor.stride()}" for p in case.placed]
        return (
            f"random operations: rank {self.rank} of {self.size}, seed {self.seed}, round {number}: {operation.__name__} by "
            f"{case.door.__name__} on ranks {case.ranks}, {case.dtype}, {case.reduction}, root {case.root}, "
            f"{'asynchronous' if case.asynchronous else 'blocking'}, tensors {tensors[:8]}. Repeat the round with\n    python -m "
            f"mpicoll.run -n {self.size} -m tests.behaviour.random_operations --seed {self.seed} --first {number} --count 1"
        )


def run(seed: int, count: int, first: int = 0, words: Callable[[str], None] = lambda text: None) -> str:
    """Runs rounds until ``count`` operations were drawn. Returns what grew in the second half."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    drawn, number, began, middle = Run(seed), first, time.monotonic(), None
    drawn.warm_up()
    done, reported = 0, 0
    while done < count:
        done += drawn.round(number)
        number += 1
        if middle is None and done >= count // 2:
            middle = Resources.now()
        if done - reported >= 10_000:
            words(f"{done} operations, {time.monotonic() - began:.0f} s")
            reported = done
    mpicoll.barrier()
    assert middle is not None
    end = Resources.now()
    words(f"{done} operations of seed {seed}: all right, {time.monotonic() - began:.1f} s. {middle} after half, then {end}")
    for group in drawn.groups[1:]:
        if group.handle is not None:
            mpicoll.destroy_process_group(group.handle)
    return end.growth_since(middle) if count >= 1000 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="number of operations")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="the first round")
    parser.add_argument("--stalls", action="store_true")
    arguments = parser.parse_args()
    mpicoll.init_process_group()
    seed = [arguments.seed]
    mpicoll.broadcast_object_list(seed, 0)
    rank = mpicoll.get_rank()
    if arguments.stalls:
        subprocess.Popen([sys.executable, "-c", STALLER, str(os.getpid()), f"{seed} {rank}"], stdin=subprocess.DEVNULL)
    grown = run(seed[0], arguments.count, arguments.first, lambda text: print(text, flush=True) if rank == 0 else None)
    mpicoll.destroy_process_group()
    sys.exit(f"rank {rank}: {grown}" if grown else 0)


if __name__ == "__main__":
    main()
