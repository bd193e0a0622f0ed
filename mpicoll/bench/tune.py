"""`bench tune`: finds the sizes from which windows are faster than MPI here, and writes a table for MPICOLL_TUNING.

At each size, each operation runs through the windows of the nodes and through MPI, in turn. The threshold is the smallest size
from which windows are not slower at any size. It holds for this number of ranks (one node) or nodes (several nodes); the file
keeps its entries for other numbers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mpicoll
from mpicoll._api import groups
from mpicoll._host.collectives import HostCollectives
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
}  # names of operations in bench, where they differ


def run(harness: Harness, output: Output, out: str, quick: bool) -> None:
    """Measures, prints and writes (collective)."""
    communicator = groups.of(None)
    assert communicator is not None
    host = communicator.host
    chosen = host.thresholds
    if not host.windows.make():
        raise SystemExit("bench tune: needs two ranks or more on a node that share memory" if harness.rank == 0 else 1)
    nodes = host.windows.nodes
    way, number = (WITHIN, harness.size) if nodes is None else (BETWEEN, len(nodes.members))
    operations = [name for name in WINDOW_FROM if nodes is None or chosen.least[name] < NEVER]  # some need equally large nodes
    found: dict[str, int] = {}
    sizes = QUICK_SIZES if quick else SIZES
    where = f"{number} ranks of one node" if nodes is None else f"{number} nodes"
    heads = " " * 16 + "".join(f"{spell(size):>9}" for size in sizes)
    output.say("", f"time through windows / time of MPI, by size; {where}", heads)
    for operation in output.progress(operations, str):
        ratios = [_ratio(harness, host, operation, size) for size in sizes]
        found[operation] = takes_over(sizes, ratios)
        cells = "".join(f"{ratio:9.2f}" for ratio in ratios)
        said, before = (spell(least) if least < NEVER else "never" for least in (found[operation], chosen.least[operation]))
        output.say(f"{operation:>16}{cells}   from {said}; so far {before}")
    host.use(chosen)
    output.extra[way] = found
    if output.active:
        write(Path(out), way, found, number, output.machine.facts())
    output.say(f"wrote {out}; use it with MPICOLL_TUNING={Path(out).absolute()}")


def takes_over(sizes: Sequence[int], ratios: Sequence[float]) -> int:
    """The smallest size from which no ratio is above 1; NEVER: the last ratio is above 1."""
    least = NEVER
    for size, ratio in zip(reversed(sizes), reversed(ratios), strict=True):
        if ratio > 1:
            break
        least = size
    return least


def _ratio(harness: Harness, host: HostCollectives, operation: str, nbytes: int) -> float:
    """Time through windows divided by the time of MPI's own."""
    nbytes = nbytes // (4 * harness.size) * 4 * harness.size
    dtype = torch.bfloat16 if operation == "halves" else torch.float32
    collective = COLLECTIVES[NAMES.get(operation, operation)](harness.shape(nbytes, dtype))
    call = collective.call_through(mpicoll, None)
    collective.memory.clear()

    def by(least: int) -> Call:
        thresholds = replace(host.thresholds, least={**dict.fromkeys(WINDOW_FROM, NEVER), operation: least})

        def called() -> object:
            host.use(thresholds)
            return call() if call is not None else None

        return called

    times = harness.rounds.times({"window": by(1), "MPI": by(NEVER)})
    return statistics.median(a / b for a, b in zip(times["window"], times["MPI"], strict=True))


def write(path: Path, way: str, thresholds: dict[str, int], number: int, machine: dict[str, Any]) -> None:
    """Writes the thresholds of this number of ranks (way: WITHIN) or nodes (BETWEEN); keeps other entries of the file."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    table = known.setdefault(way, {})
    for operation, least in thresholds.items():
        table[operation] = {**table.get(operation, {}), str(number): least}
    path.write_text(json.dumps({**known, "machine": machine}, indent=1) + "\n")
