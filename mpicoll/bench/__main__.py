"""python -m mpicoll.run -n 2 -m mpicoll.bench [WHAT] [options]; WHAT is all_reduce where nothing is said.

Each implementation is checked before it is timed. All of them are measured in turn, in the same rounds on the same ranks:

    mpicoll          mpicoll.all_reduce(tensor)
    torch backend    torch.distributed.all_reduce(tensor), backend "mpi"
    Gloo             torch.distributed.all_reduce(tensor, group=...), backend "gloo"
    NCCL             the same, backend "nccl": with --device cuda, where every rank has a GPU
    MPI              mpi4py on NumPy memory
    floor            one rank's memory copy, on the host or on its GPU

`WHAT --help` lists the options.
"""

from __future__ import annotations

import os
import platform
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch

from mpicoll.bench import (
    check,
    ddp,
    everything,
    jobs,
    machine,
    options,
    overlap,
    plot,
    remote_calls,
    startup,
    sweep,
    table,
    tune,
)
from mpicoll.bench.model import command as model_command
from mpicoll.bench.report import Report
from mpicoll.bench.rounds import QUICK, Pace
from mpicoll.bench.stage import Stage, stage

BETWEEN_TWO = ("latency", "bandwidth", "all")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where `check` has found a ratio over its limit."""
    asked = options.read(arguments, __doc__)
    torch.set_num_threads(1)
    if asked.what == "rpc":
        here = f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__}"
        remote_calls.measure(asked.sizes, asked.repeat or Pace().rounds, here, asked.width)
        return 0
    if asked.what == "model":
        return model_command.main(asked) if options.rank() == 0 else 0
    pace = QUICK if asked.quick else PACES.get(asked.what, Pace())
    with stage(replace(pace, rounds=asked.repeat or pace.rounds), getattr(asked, "device", "cpu")) as there:
        if there.size < 2 and asked.what in BETWEEN_TWO:
            raise SystemExit(f"bench {asked.what}: needs two ranks; python -m mpicoll.run -n 2 -m mpicoll.bench {asked.what}")
        report = Report(machine.describe(there.referee), there.rank)
        report.say(*report.machine.lines())
        status = _measure(there, report, asked)
        report.write(asked.json, asked.csv)
        if asked.plot and report.active:
            plot.draw(report.rows, report.machine, asked.plot)
            report.say(f"wrote {asked.plot}")
    return status


PACES = {
    "all": Pace(rounds=9),
    "check": Pace(rounds=9, round_s=0.03, row_s=2.0),
    "tune": Pace(rounds=7, round_s=0.02, row_s=2.0),
}


def _measure(here: Stage, report: Report, asked: Namespace) -> int:
    if asked.what == "all":
        everything.run(here, report, asked.quick, asked.markdown)
    elif asked.what == "check":
        lost = check.run(here, report)
        report.say(*(f"lost: {line}" for line in lost))
        return 1 if lost else 0
    elif asked.what == "tune":
        tune.run(here, report, asked.out, asked.quick)
    elif asked.what == "overlap":
        overlap.run(here, report, asked.sizes)
    elif asked.what == "ddp":
        ddp.run(here, report, asked.sizes, resnet=not asked.quick)
    elif asked.what == "startup":
        _startup(here, report, asked)
    else:
        report.say(*table.LEGEND)
        dtypes, ops = getattr(asked, "dtypes", ["float32"]), getattr(asked, "ops", ["SUM"])
        plan = sweep.Plan(asked.what, asked.sizes, dtypes, ops, [options.WAYS[way] for way in asked.ways])
        report.say(*table.copy_lines(sweep.run(here, report, [plan])))
    return 0


def _startup(here: Stage, report: Report, asked: Namespace) -> None:
    found = jobs.OnRank0(here.referee, lambda: startup.measure(asked.ranks, asked.repeat or (1 if asked.quick else 5)))
    if found.value is None:
        raise SystemExit(f"bench startup: {found.reason}" if here.rank == 0 else 1)
    report.say(*found.value.lines(asked.ranks))
    report.extra["startup"] = found.value.facts()


if __name__ == "__main__":
    sys.exit(main())
