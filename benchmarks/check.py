"""Has speed been lost? Compares a few ratios with their limits. Exit status 1: a ratio is over its limit.

python -m mpicoll.run -n 2 -m benchmarks.check
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.session import Figure, added, make_parser, opened, to, to_better
from mpicoll.bench.formulas import spell
from mpicoll.bench.harness import Harness
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.rounds import Pace
from mpicoll.bench.row import API, BACKEND, GLOO, RAW
from mpicoll.bench.table import Output

KIB, MIB = 1 << 10, 1 << 20
PACE = Pace(rounds=9, round_s=0.03, row_s=2.0)

# The memory of a shared machine can be three times as slow for seconds (same commit, 64 MiB: 14 ms and 48 ms, alternating), which
# affects implementations differently. A ratio over its limit is measured again, and the smallest one counts.
TRIES = 8


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


def _better(at_most: float) -> Limit:
    return Limit("/ the better of Gloo and MPI", to_better, at_most)


F32, ALL = torch.float32, (API, GLOO, RAW)
# Twice the measured ratios, or more where runs differ (2 ranks on 2 cores, Open MPI and MPICH). A lost fast path of small
# calls, or a lost window of large ones, gives far larger ratios.
ADDED = Limit("us more through the torch backend than through the mpicoll API", added, 24)
CASES = [
    Case("all_reduce", 8, F32, (API, BACKEND, RAW), [_mpi(8.0), ADDED]),
    Case("all_reduce", 64 * KIB, F32, (API, GLOO), [_gloo(0.1)]),
    Case("all_reduce", MIB, F32, ALL, [_gloo(0.25), _mpi(2.2)]),
    Case("all_reduce", 64 * MIB, F32, ALL, [_gloo(0.4), _mpi(0.6)]),
    Case("all_reduce", 16 * MIB, torch.bfloat16, (API, GLOO), [_gloo(0.4)]),
    Case("all_gather_into_tensor", 16 * MIB, F32, ALL, [_better(2.0)]),
    Case("reduce_scatter_tensor", 16 * MIB, F32, ALL, [_better(1.4)]),
]


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
    return lost


def _least(harness: Harness, output: Output, case: Case) -> list[float]:
    """The figure of each limit: the smallest of at most `TRIES` measurements."""
    least = [float("inf")] * len(case.limits)
    for _ in range(TRIES):
        row = harness.row(case.what, COLLECTIVES[case.what], case.nbytes, case.dtype, "SUM", case.ways)
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
