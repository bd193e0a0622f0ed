"""Runs one benchmark: reads the options, measures on all ranks, prints and writes on rank 0."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

from mpicoll.bench import machine, options, sweep, table, tune
from mpicoll.bench.harness import open_harness
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.output import Output
from mpicoll.bench.rounds import QUICK, Pace


def run(words: Sequence[str], description: str) -> None:
    """Measures what the command line asks for (collective)."""
    args = options.read(words, description)
    torch.set_num_threads(1)
    pace = QUICK if args.quick else tune.PACE if args.what == "tune" else Pace()
    with open_harness(replace(pace, rounds=args.repeat or pace.rounds), getattr(args, "device", "cpu")) as harness:
        if harness.size < 2 and args.what in MESSAGES:
            raise SystemExit(f"bench {args.what}: needs two ranks; python -m mpicoll.run -n 2 -m mpicoll.bench {args.what}")
        output = Output(machine.describe(harness.control), harness.rank)
        output.say(*output.machine.lines())
        if args.what == "tune":
            tune.run(harness, output, args.out, args.quick)
        else:
            output.say(*table.LEGEND)
            output.say(*table.copy_lines(sweep.run(harness, output, _rows(args))))
        output.write(args.json)


def _rows(args: Namespace) -> sweep.Sweep:
    dtypes, ops = getattr(args, "dtypes", ["float32"]), getattr(args, "ops", ["SUM"])
    ways = [options.WAYS[way] for way in args.ways]
    return sweep.Sweep(args.what, args.sizes, dtypes, ops, ways)
