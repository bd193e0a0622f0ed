"""Runs one benchmark: reads the options, measures on all ranks, prints and writes on rank 0."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch

from mpicoll.bench import options, table, tune
from mpicoll.bench.formulas import EMPTY, IN_PARTS, REDUCTIONS
from mpicoll.bench.harness import Harness, Maker, Skipped, open_harness
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.rounds import QUICK, Pace

KNOWN: dict[str, Maker] = {**COLLECTIVES, **MESSAGES}


def run(words: Sequence[str]) -> None:
    """Measures what the command line asks for (collective)."""
    args = options.read(words)
    pace = QUICK if args.quick else tune.PACE if args.what == "tune" else Pace()
    with open_harness(replace(pace, rounds=args.repeat or pace.rounds), args.device, args.threads) as harness:
        if harness.size < 2 and args.what in MESSAGES:
            raise SystemExit(f"bench {args.what}: needs two ranks; python -m mpicoll.run -n 2 -m mpicoll.bench {args.what}")
        output = table.Output(table.describe(harness.control), harness.rank)
        output.say(*output.machine.lines())
        if args.what == "tune":
            tune.run(harness, output, args.out, args.quick)
        else:
            output.say(*table.LEGEND)
            _measure(harness, output, args)
        output.write(args.json)


def _measure(harness: Harness, output: table.Output, args: Namespace) -> None:
    """Measures and prints a table for each dtype and reduction (collective)."""
    what, ways = args.what, [options.WAYS[way] for way in args.impl]
    for name, op in product(args.dtypes, args.ops):
        dtype = getattr(torch, name)
        title = ", ".join([what, *([] if what in EMPTY else [name]), *([op] if what in REDUCTIONS else [])])
        lines = table.Table(title, ways)
        unit = dtype.itemsize * (harness.size if what in IN_PARTS else 1)  # tensors are split among the ranks
        sizes = [0] if what in EMPTY else dict.fromkeys(max(unit, nbytes // unit * unit) for nbytes in args.sizes)
        for i, nbytes in enumerate(sizes):
            try:
                row = output.add(harness.row(what, KNOWN[what], nbytes, dtype, op, ways))
            except Skipped as skipped:
                output.say("", f"skipped: {skipped}")
                break
            output.say(*(lines.head() if i == 0 else []), lines.line(row))
            if i == 0:
                output.say(*(f"          {way} left out: {why}" for way, why in (row.missing or {}).items()))
