"""`bench tune`: from which sizes on are windows the faster way here? Writes a table that MPICOLL_TUNING names.

Each operation goes through the node's window, or over several nodes through theirs, and by MPI's own, in turn, at each size;
the window takes over at the least size from which it is not slower at any. On one node that is known of this number of ranks
then, on several of this number of nodes; what the file knows of others stays in it.
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
from mpicoll._api import groups
from mpicoll._host.thresholds import BETWEEN, NEVER, WINDOW_FROM, WITHIN
from mpicoll.bench.formulas import spell
from mpicoll.bench.harness import Harness
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.output import Output
from mpicoll.bench.rounds import Call

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


def run(harness: Harness, output: Output, out: str, quick: bool) -> None:
    """Measures, prints and writes (collective)."""
    carrier: Any = groups.of(None).carrier  # type: ignore[union-attr]
    chosen = dict(carrier.least)
    nodes = carrier.nodes()
    if nodes is None and carrier.window() is None:
        raise SystemExit("bench tune: wants two ranks or more on a node that share memory" if harness.rank == 0 else 1)
    way, number = (WITHIN, harness.size) if nodes is None else (BETWEEN, len(nodes.members))
    operations = [name for name in WINDOW_FROM if nodes is None or chosen[name] < NEVER]  # some want even nodes
    carrier.least.update(dict.fromkeys(chosen, NEVER))
    found: dict[str, int] = {}
    sizes = QUICK_SIZES if quick else SIZES
    where = f"{number} ranks of one node" if nodes is None else f"{number} nodes"
    heads = " " * 16 + "".join(f"{spell(size):>9}" for size in sizes)
    output.say("", f"time through windows / time of MPI's own, by size; {where}", heads)
    with output.progress(len(operations)) as step:
        for operation in operations:
            step(operation)
            ratios = [_ratio(harness, carrier, operation, size) for size in sizes]
            found[operation] = takes_over(sizes, ratios)
            cells = "".join(f"{ratio:9.2f}" for ratio in ratios)
            said, before = (spell(least) if least < NEVER else "never" for least in (found[operation], chosen[operation]))
            output.say(f"{operation:>16}{cells}   from {said}; so far {before}")
    carrier.least.update(chosen)
    output.extra[way] = found
    if output.active:
        write(Path(out), way, found, number, output.machine.facts())
    output.say(f"wrote {out}; use it with MPICOLL_TUNING={Path(out).absolute()}")


def takes_over(sizes: Sequence[int], ratios: Sequence[float]) -> int:
    """The least size from which no ratio is above 1; NEVER: the last one is."""
    least = NEVER
    for size, ratio in zip(reversed(sizes), reversed(ratios), strict=True):
        if ratio > 1:
            break
        least = size
    return least


def _ratio(harness: Harness, carrier: Any, operation: str, nbytes: int) -> float:
    nbytes = nbytes // (4 * harness.size) * 4 * harness.size
    dtype = torch.bfloat16 if operation == "halves" else torch.float32
    collective = COLLECTIVES[NAMES.get(operation, operation)](harness.shape(nbytes, dtype))
    call = collective.call_through(mpicoll, None)
    collective.memory.clear()

    def by(least: int) -> Call:
        def called() -> object:
            carrier.least[operation] = least
            return call() if call is not None else None

        return called

    times = harness.rounds.times({"window": by(1), "MPI": by(NEVER)})
    carrier.least[operation] = NEVER
    return statistics.median(a / b for a, b in zip(times["window"], times["MPI"], strict=True))


def write(path: Path, way: str, found: dict[str, int], number: int, machine: dict[str, Any]) -> None:
    """Into a new file, or into what is there of other numbers of ranks (way: WITHIN) or nodes (BETWEEN)."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    table = known.setdefault(way, {})
    for operation, least in found.items():
        table[operation] = {**table.get(operation, {}), str(number): least}
    path.write_text(json.dumps({**known, "machine": machine}, indent=1) + "\n")
