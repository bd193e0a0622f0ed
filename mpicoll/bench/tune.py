"""`bench tune`: finds the sizes from which mpicoll's algorithms are faster than MPI's, and writes a table for MPICOLL_TUNING.

At each size, each operation runs through the windows of the nodes (by direct exchange, where each node has one rank) and through
MPI, in turn. The threshold is the smallest size from which MPI is not faster at any size. It holds for this number of ranks (one
node) or nodes (several nodes); the file keeps its entries for other numbers.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mpicoll
from mpicoll._api import groups
from mpicoll._host.algorithm_choice import APART, BETWEEN, DIRECT, NEVER, WINDOW_FROM, WITHIN, Thresholds
from mpicoll._host.collectives import HostCollectives
from mpicoll.bench.formulas import spell
from mpicoll.bench.harness import Harness
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.rounds import Call, Pace
from mpicoll.bench.table import Output

PACE = Pace(rounds=7, round_s=0.02, row_s=2.0)
SIZES = [1 << power for power in range(10, 23)]  # bytes; 1 KiB to 4 MiB
QUICK_SIZES = [4 << 10, 1 << 20]
# Names of operations in bench, where they differ
NAMES = {"halves": "all_reduce", "reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}


def run(harness: Harness, output: Output, out: str, quick: bool) -> None:
    """Measures, prints and writes (collective)."""
    communicator = groups.of(None)
    assert communicator is not None
    host = communicator.host
    chosen = host.thresholds
    if harness.size < 2:
        raise SystemExit("bench tune: needs two ranks or more")
    if chosen.large != DIRECT and not host.windows.make():
        raise SystemExit("bench tune: a node has no shared memory for its ranks" if harness.rank == 0 else 1)
    table, number, where = _layout(host, harness.size)
    way = "by direct exchange" if table == APART else "through windows"
    operations = [name for name in WINDOW_FROM if table != BETWEEN or chosen.least[name] < NEVER]  # some need equal nodes
    found: dict[str, int] = {}
    sizes = QUICK_SIZES if quick else SIZES
    heads = " " * 16 + "".join(f"{spell(size):>9}" for size in sizes)
    output.say("", f"time {way} / time of MPI, by size; {where}", heads)
    for operation in operations:
        ratios = [_ratio(harness, host, operation, size) for size in sizes]
        found[operation] = takes_over(sizes, ratios)
        cells = "".join(f"{ratio:9.2f}" for ratio in ratios)
        said, before = (spell(least) if least < NEVER else "never" for least in (found[operation], chosen.least[operation]))
        output.say(f"{operation:>16}{cells}   from {said}; so far {before}")
    host.use(chosen)
    output.extra[table] = found
    if output.active:
        write(Path(out), table, found, number, output.machine.facts())
    output.say(f"wrote {out}; use it with MPICOLL_TUNING={Path(out).absolute()}")


def _layout(host: HostCollectives, ranks: int) -> tuple[str, int, str]:
    """The name of the table for these ranks, their number or that of the nodes, and where they are in words."""
    if host.thresholds.large == DIRECT:
        return APART, ranks, f"{ranks} nodes of one rank each"
    if host.windows.nodes is None:
        return WITHIN, ranks, f"{ranks} ranks of one node"
    nodes = len(host.windows.nodes.members)
    return BETWEEN, nodes, f"{nodes} nodes"


def takes_over(sizes: Sequence[int], ratios: Sequence[float]) -> int:
    """The smallest size from which no ratio is above 1; NEVER: the last ratio is above 1."""
    least = NEVER
    for size, ratio in zip(reversed(sizes), reversed(ratios), strict=True):
        if ratio > 1:
            break
        least = size
    return least


def _ratio(harness: Harness, host: HostCollectives, operation: str, nbytes: int) -> float:
    """Returns the time of mpicoll's algorithm divided by the time of MPI's."""
    nbytes = nbytes // (4 * harness.size) * 4 * harness.size
    dtype = torch.bfloat16 if operation == "halves" else torch.float32
    collective = COLLECTIVES[NAMES.get(operation, operation)](harness.shape(nbytes, dtype))
    call = collective.call_through(mpicoll, None)
    collective.memory.clear()

    def by(least: int) -> Call:
        thresholds = only(host.thresholds, operation, least)

        def called() -> object:
            host.use(thresholds)
            return call() if call is not None else None

        return called

    times = harness.rounds.times({"mpicoll": by(1), "MPI": by(NEVER)})
    return statistics.median(a / b for a, b in zip(times["mpicoll"], times["MPI"], strict=True))


def only(thresholds: Thresholds, operation: str, least: int) -> Thresholds:
    """The thresholds by which ``operation`` leaves MPI from ``least`` bytes on, and no other operation does.

    Between nodes of one rank, half precision below its threshold would be a direct exchange, too: MPI as float32 takes its place.
    """
    direct_from = NEVER if thresholds.large == DIRECT else thresholds.direct_from
    return thresholds._replace(least={**dict.fromkeys(WINDOW_FROM, NEVER), operation: least}, direct_from=direct_from)


def write(path: Path, name: str, thresholds: dict[str, int], number: int, machine: dict[str, Any]) -> None:
    """Writes the thresholds of this number of ranks (name: WITHIN) or nodes (BETWEEN, APART); keeps other entries of the file."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    table = known.setdefault(name, {})
    for operation, least in thresholds.items():
        each = -(-least // number) if name == APART and least < NEVER else least  # that table has the bytes for each rank
        table[operation] = {**table.get(operation, {}), str(number): each}
    path.write_text(json.dumps({**known, "machine": machine}, indent=1) + "\n")
