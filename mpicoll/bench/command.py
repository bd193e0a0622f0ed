"""Runs one benchmark: reads the options, measures on all ranks, prints and writes on rank 0."""

from __future__ import annotations

import os
import platform
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

from mpicoll.bench import (
    check,
    footprint,
    jobs,
    machine,
    one_stream,
    options,
    overlap,
    overview,
    plot,
    remote_calls,
    startup,
    summary,
    sweep,
    table,
    tune,
)
from mpicoll.bench.harness import Harness, open_harness
from mpicoll.bench.output import Output
from mpicoll.bench.rounds import QUICK, Pace

BETWEEN_TWO = ("latency", "exchange", "bandwidth", "all")


def run(words: Sequence[str], description: str) -> int:
    """Returns the exit status: 1 if `check` finds a ratio over its limit."""
    args = options.read(words, description)
    torch.set_num_threads(1)
    if args.what == "rpc":
        machine_text = f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__}"
        remote_calls.measure(args.sizes, args.repeat or Pace().rounds, machine_text, args.width)
        return 0
    if args.what == "summary":
        return _summary(args) if overview.rank() == 0 else 0
    if args.what == "ranks":
        return _ranks(args) if overview.rank() == 0 else 0
    pace = QUICK if args.quick else PACES.get(args.what, Pace())
    with open_harness(replace(pace, rounds=args.repeat or pace.rounds), getattr(args, "device", "cpu")) as harness:
        if harness.size < 2 and args.what in BETWEEN_TWO:
            raise SystemExit(f"bench {args.what}: needs two ranks; python -m mpicoll.run -n 2 -m mpicoll.bench {args.what}")
        output = Output(machine.describe(harness.control), harness.rank)
        output.say(*output.machine.lines())
        status = _measure(harness, output, args)
        output.write(args.json, args.csv)
        if args.plot and output.active:
            plot.draw(output.rows, output.machine, args.plot)
            output.say(f"wrote {args.plot}")
    return status


PACES = {
    "all": Pace(rounds=9),
    "check": Pace(rounds=9, round_s=0.03, row_s=2.0),
    "step": Pace(rounds=15, round_s=0.2, row_s=10.0),
    "tune": Pace(rounds=7, round_s=0.02, row_s=2.0),
}


def _measure(harness: Harness, output: Output, args: Namespace) -> int:
    if args.what in ("all", "ddp", "step"):
        _train(harness, output, args)
    elif args.what == "check":
        lost = check.run(harness, output)
        output.say(*(f"lost: {line}" for line in lost))
        return 1 if lost else 0
    elif args.what == "tune":
        tune.run(harness, output, args.out, args.quick)
    elif args.what == "overlap":
        overlap.run(harness, output, args.sizes)
    elif args.what == "startup":
        _startup(harness, output, args)
    else:
        output.say(*table.LEGEND)
        dtypes, ops = getattr(args, "dtypes", ["float32"]), getattr(args, "ops", ["SUM"])
        ways, bandwidth = [options.WAYS[way] for way in args.ways], _bandwidth(harness, output, getattr(args, "bandwidth", None))
        rows = sweep.Sweep(args.what, args.sizes, dtypes, ops, ways, bandwidth)
        output.say(*table.copy_lines(sweep.run(harness, output, [rows])))
    return 0


def _train(harness: Harness, output: Output, args: Namespace) -> None:
    from mpicoll.bench import everything  # loads FSDP2 and pipelines: 1.4 s
    from mpicoll.bench.steps import catalog, measure

    if args.what == "all":
        everything.run(harness, output, args.quick, args.markdown)
    elif args.what == "ddp":
        measure.run(harness, output, catalog.ddp(args.sizes, resnet=not args.quick))
    else:
        measure.run(harness, output, catalog.steps(args.rows, harness.size, args.quick))


def _bandwidth(harness: Harness, output: Output, given: float | str | None) -> float | None:
    """GB/s of a network card as given or measured; None: the table has no column for it."""
    if not isinstance(given, str):
        return given
    try:
        measured, other = one_stream.measure(harness)
    except ValueError as error:
        raise SystemExit(f"bench: {error}" if harness.rank == 0 else 1) from None
    output.say(f"network: {measured:.3g} GB/s by one stream of messages from rank 0 to rank {other}", "")
    return measured


def _summary(args: Namespace) -> int:
    try:
        print(*summary.lines(summary.read(args.runs), args.markdown), sep="\n")
    except summary.WrongFile as error:
        raise SystemExit(f"bench summary: {error}") from None
    return 0


def _ranks(args: Namespace) -> int:
    try:
        footprint.measure(args.ranks)
    except jobs.ChildFailed as failed:
        raise SystemExit(f"bench ranks: {failed}") from None
    return 0


def _startup(harness: Harness, output: Output, args: Namespace) -> None:
    outcome = jobs.OnRank0(harness.control, lambda: startup.measure(args.ranks, args.repeat or (1 if args.quick else 5)))
    if outcome.value is None:
        raise SystemExit(f"bench startup: {outcome.reason}" if harness.rank == 0 else 1)
    output.say(*outcome.value.lines(args.ranks))
    output.extra["startup"] = outcome.value.facts()
