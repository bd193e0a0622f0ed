"""Has speed been lost? Compares ratios with their limits. Exit status 1: a ratio is over its limit.

python -m mpicoll.run -n 2 -m benchmarks.check

The ratios are to raw MPI or to Gloo in the same rounds, or to half as many bytes. tests/behaviour/test_bytecodes.py counts what
small operations add to a call of MPI.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.session import Figure, added, make_parser, opened, to, to_better
from mpicoll.bench.formulas import spell
from mpicoll.bench.harness import Harness
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.operations import COLLECTIVES, Call, Operation, Shape, all_reduce
from mpicoll.bench.rounds import Pace
from mpicoll.bench.row import API, BACKEND, GLOO, RAW
from mpicoll.bench.table import Output

KIB, MIB = 1 << 10, 1 << 20
PACE = Pace(rounds=9, round_s=0.03, row_s=2.0)
LATE_S = 20e-3  # so long after the others the last rank comes: they sleep then

# The memory of a shared machine can be three times as slow for seconds (same commit, 64 MiB: 14 ms and 48 ms, alternating), which
# affects implementations differently. A ratio over its limit is measured again, and the smallest one counts.
TRIES = 5


@dataclass(frozen=True)
class Limit:
    name: str
    figure: Figure
    at_most: float


@dataclass(frozen=True)
class Case:
    what: str
    nbytes: int
    dtype: torch.dtype
    ways: Sequence[str]
    limits: Sequence[Limit]

    def __str__(self) -> str:
        return f"{spell(self.nbytes)} {self.what} {str(self.dtype).removeprefix('torch.')}"


def _gloo(at_most: float) -> Limit:
    return Limit("/ Gloo", to(GLOO), at_most)


def _mpi(at_most: float) -> Limit:
    return Limit("/ MPI", to(RAW), at_most)


def _torch(at_most: float) -> Limit:
    return Limit("through torch / MPI", lambda row: row.ratio(BACKEND, RAW), at_most)


def _better(at_most: float) -> Limit:
    return Limit("/ the better of Gloo and MPI", to_better, at_most)


F32, ALL = torch.float32, (API, GLOO, RAW)


def late(s: Shape) -> Operation:
    """An all_reduce to which the last rank comes `LATE_S` later."""
    usual = all_reduce(s)
    raw = usual.raw

    def after(call: Call | None) -> Call | None:
        if call is None:
            return None

        def called() -> None:
            if s.rank == s.size - 1:
                time.sleep(LATE_S)
            call()

        return called

    def call_through(module: Any, group: Any) -> Call | None:
        return after(usual.call_through(module, group))

    return replace(usual, call_through=call_through, raw=None if raw is None else lambda: after(raw()))


OPERATIONS: dict[str, Callable[[Shape], Operation]] = {**COLLECTIVES, **MESSAGES, "late": late}

# 1.6 times the measured ratios, or more where runs differ (2 ranks on 2 cores, Open MPI and MPICH). A lost fast path of small
# calls, a lost window of large ones, or a sleep while bytes move gives far larger ratios.
ADDED = Limit("us more through the torch backend than through the mpicoll API", added, 30)
CASES = [
    Case("all_reduce", 8, F32, (API, BACKEND, RAW), [_mpi(7.5), ADDED]),
    Case("all_reduce", 64 * KIB, F32, (API, GLOO), [_gloo(0.15)]),
    Case("all_reduce", MIB, F32, ALL, [_gloo(0.4), _mpi(2.6)]),
    Case("all_reduce", 64 * MIB, F32, ALL, [_gloo(0.8), _mpi(0.9)]),
    Case("all_reduce", 16 * MIB, torch.bfloat16, (API, GLOO), [_gloo(0.6)]),
    Case("all_gather_into_tensor", 16 * MIB, F32, ALL, [_better(2.0)]),
    Case("reduce_scatter_tensor", 16 * MIB, F32, ALL, [_better(1.4)]),
    Case("latency", 8, F32, (API, BACKEND, RAW), [_mpi(15.0), _torch(43.0)]),
    Case("latency", MIB, F32, (API, BACKEND, RAW), [_mpi(2.5), _torch(3.0)]),
    Case("latency", 64 * MIB, F32, (API, BACKEND, RAW), [_mpi(1.7), _torch(1.8)]),
    Case("exchange", 64 * MIB, F32, (API, BACKEND, RAW), [_mpi(1.8), _torch(1.8)]),
    Case("late", 8, F32, (API, BACKEND, RAW), [_mpi(1.09), _torch(1.09)]),
]
# From which size to which twice the bytes take at most so many times as long. Where the algorithm changes, it may be more than 2.
STEEP = [("latency", MIB, 64 * MIB, 3.6), ("all_reduce", 64 * KIB, 64 * MIB, 4.5)]


def run(harness: Harness, output: Output, cases: Sequence[Case] = CASES) -> list[str]:
    """Measures and prints (collective). Returns a line for each ratio over its limit, the same lines on every rank."""
    lost: list[str] = []
    output.say(f"{'':>64}{'measured':>10}{'at most':>9}")
    for case in cases:
        for limit, figure in zip(case.limits, _least(harness, output, case), strict=True):
            over = figure > limit.at_most
            line = f"{case} {limit.name}"
            output.say(f"{line:>64}{figure:>10.3f}{limit.at_most:>9.3f}{'  OVER' if over else ''}")
            if over:
                lost.append(f"{line}: {figure:.3f}, at most {limit.at_most:g}; the least of {TRIES} measurements")
    for what, first, last, at_most in STEEP:
        lost += _cliffs(harness, output, what, first, last, at_most)
    return lost


def _cliffs(harness: Harness, output: Output, what: str, first: int, last: int, at_most: float) -> list[str]:
    """Returns a line for each size that takes too many times as long as half of it, by the least times of all tries.

    Where raw MPI takes more than twice as long in the same rounds, the machine does: its caches, which others use, too.
    """
    sizes = [first << step for step in range((last // first).bit_length())]
    least = {(way, nbytes): math.inf for way in (API, RAW) for nbytes in sizes}
    for _ in range(TRIES):
        for nbytes in sizes:
            row = harness.row(what, OPERATIONS[what], nbytes, F32, "SUM", (API, RAW))
            for way in (API, RAW):
                least[way, nbytes] = min(least[way, nbytes], *row.times[way])
        steps = {(way, nbytes): least[way, nbytes] / least[way, nbytes // 2] for way in (API, RAW) for nbytes in sizes[1:]}
        steep = {nbytes: steps[API, nbytes] / max(1.0, steps[RAW, nbytes] / 2) for nbytes in sizes[1:]}
        if max(steep.values()) <= at_most:
            break
    line = f"{spell(first)} to {spell(last)} {what}, each / half of it"
    output.say(f"{line:>64}{max(steep.values()):>10.3f}{at_most:>9.3f}")
    return [f"{spell(n)} {what} / half of it: {ratio:.3f}, at most {at_most:g}" for n, ratio in steep.items() if ratio > at_most]


def _least(harness: Harness, output: Output, case: Case) -> list[float]:
    """The figure of each limit: the smallest of at most `TRIES` measurements."""
    least = [float("inf")] * len(case.limits)
    for _ in range(TRIES):
        row = harness.row(case.what, OPERATIONS[case.what], case.nbytes, case.dtype, "SUM", case.ways)
        output.add(row)
        figures = [limit.figure(row) for limit in case.limits]
        least = [min(a, b if b is not None else a) for a, b in zip(least, figures, strict=True)]
        if all(figure <= limit.at_most for figure, limit in zip(least, case.limits, strict=True)):
            break
    return least


def main(words: Sequence[str] | None = None) -> int:
    args = make_parser(__doc__).parse_args(words)
    with opened(args, PACE) as (harness, output):
        lost = run(harness, output)
        output.say(*(f"lost: {line}" for line in lost))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
