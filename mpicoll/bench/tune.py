"""`bench tune`: from which sizes on is the window the faster way here? Writes a table that MPICOLL_TUNING names.

Each operation goes through the node's window and by MPI's own, in turn, at each size; the window takes over at the least size
from which it is not slower at any. What the file knows of other numbers of ranks stays in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mpicoll
from mpicoll.api import world
from mpicoll.bench.exchanges import COLLECTIVES
from mpicoll.bench.formulas import spell
from mpicoll.bench.report import Report
from mpicoll.bench.rounds import Call
from mpicoll.bench.stage import Stage
from mpicoll.engine.choose import NEVER, WINDOW_FROM

FILE = "mpicoll-tuning.json"
SIZES = [1 << power for power in range(10, 23)]  # bytes; 1 KiB to 4 MiB
QUICK_SIZES = [4 << 10, 1 << 20]
NAMES = {
    "halves": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_gather": "all_gather_into_tensor",
}  # where bench says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE", default=FILE, help=f"the table; default {FILE}")


def run(stage: Stage, report: Report, out: str, quick: bool) -> None:
    """Measures, prints and writes (collective)."""
    carrier: Any = world.of(None).carrier  # type: ignore[union-attr]
    chosen = dict(carrier.least)
    carrier.least = dict.fromkeys(chosen, 1)
    if stage.size < 2 or carrier.window() is None:
        raise SystemExit("bench tune: wants two ranks or more on one node that share memory" if stage.rank == 0 else 1)
    found: dict[str, int] = {}
    sizes = QUICK_SIZES if quick else SIZES
    report.say(
        "", "time through the window / time of MPI's own, by size", " " * 16 + "".join(f"{spell(size):>9}" for size in sizes)
    )
    with report.progress(len(chosen)) as step:
        for operation in WINDOW_FROM:
            step(operation)
            ratios = [_ratio(stage, carrier, operation, size) for size in sizes]
            found[operation] = takes_over(sizes, ratios)
            cells = "".join(f"{ratio:9.2f}" for ratio in ratios)
            said = spell(found[operation]) if found[operation] < NEVER else "never"
            report.say(f"{operation:>16}{cells}   from {said}; so far {spell(chosen[operation])}")
    carrier.least = chosen
    report.extra["window_from"] = found
    if report.active:
        write(Path(out), found, stage.size, report.machine.facts())
    report.say(f"wrote {out}; use it with MPICOLL_TUNING={Path(out).absolute()}")


def takes_over(sizes: Sequence[int], ratios: Sequence[float]) -> int:
    """The least size from which no ratio is above 1; NEVER: the last one is."""
    least = NEVER
    for size, ratio in zip(reversed(sizes), reversed(ratios), strict=True):
        if ratio > 1:
            break
        least = size
    return least


def _ratio(stage: Stage, carrier: Any, operation: str, nbytes: int) -> float:
    nbytes = nbytes // (4 * stage.size) * 4 * stage.size
    dtype = torch.bfloat16 if operation == "halves" else torch.float32
    exchange = COLLECTIVES[NAMES.get(operation, operation)](stage.shape(nbytes, dtype))
    call = exchange.door(mpicoll, None)
    exchange.memory.clear()

    def by(least: int) -> Call:
        def called() -> object:
            carrier.least[operation] = least
            return call() if call is not None else None

        return called

    times = stage.rounds.times({"window": by(1), "MPI": by(NEVER)})
    return statistics.median(a / b for a, b in zip(times["window"], times["MPI"], strict=True))


def write(path: Path, found: dict[str, int], ranks: int, machine: dict[str, Any]) -> None:
    """Into a new file, or into what is there of other numbers of ranks."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    table = known.get("window_from", {})
    for operation, least in found.items():
        table[operation] = {**table.get(operation, {}), str(ranks): least}
    path.write_text(json.dumps({"machine": machine, "window_from": table}, indent=1) + "\n")
