"""What several scripts share: their options, a world to measure in, and figures of a row."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import sub
from typing import Any

from mpicoll.bench import options
from mpicoll.bench.harness import Harness, open_harness
from mpicoll.bench.options import Parser
from mpicoll.bench.rounds import QUICK, Pace
from mpicoll.bench.row import API, BACKEND, GLOO, RAW, Row
from mpicoll.bench.table import Output, describe

Figure = Callable[[Row], "float | None"]


def make_parser(description: str | None) -> Parser:
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=options.count, metavar="N", help="rounds, each of all implementations in turn")
    parser.add_argument("--quick", action="store_true", help="a quick test: few and short rounds")
    parser.add_argument("--json", metavar="FILE", help="write all figures, with the time of every round")
    return parser


@contextmanager
def opened(args: argparse.Namespace, pace: Pace) -> Iterator[tuple[Harness, Output]]:
    """A world, and its output, which is written to ``--json`` at the end (collective)."""
    pace = QUICK if args.quick else pace
    with open_harness(replace(pace, rounds=args.repeat or pace.rounds)) as harness:
        output = Output(describe(harness.control), harness.rank)
        output.say(*output.machine.lines())
        yield harness, output
        output.write(args.json)


def read_row(facts: dict[str, Any]) -> Row:
    """A row of a file that ``--json`` has written."""
    times = {way: [us / 1e6 for us in figures["rounds_us"]] for way, figures in facts["ways"].items()}
    return Row(facts["what"], facts["bytes"], facts["ranks"], times, facts["dtype"], facts["op"])


def milli(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def difference(row: Row, way: str, to: str) -> float | None:
    """Median over the rounds of the difference in seconds; None if one of the two was not measured."""
    if not {way, to} <= row.times.keys():
        return None
    return float(statistics.median(map(sub, row.times[way], row.times[to])))


def to(way: str) -> Figure:
    """The ratio of the mpicoll API to ``way``."""
    return lambda row: row.ratio(API, way)


def to_better(row: Row) -> float | None:
    """The ratio of the mpicoll API to the faster of Gloo and MPI."""
    return max((ratio for other in (GLOO, RAW) if (ratio := row.ratio(API, other)) is not None), default=None)


def added(row: Row) -> float | None:
    """Microseconds that the torch backend adds to the mpicoll API."""
    seconds = difference(row, BACKEND, API)
    return None if seconds is None else seconds * 1e6


def mpi_name(library: str) -> str:
    """Returns the name and the version alone: "Open MPI v5.0.11, package: ..." -> "Open MPI 5.0.11"."""
    return " ".join(library.splitlines()[0].split(",")[0].replace(" v", " ").replace(" Version:", "").split())
