"""Measures collectives between hosts and compares them with the bandwidth limit.

    python -m benchmarks.bandwidth --mbit 100 --layouts 4x1 2x2 --sizes 16MiB --operations all_reduce
    ... --write                           also puts the figures into benchmarks/bandwidth.json, with those of other runs
    python -m benchmarks.bandwidth --table        the table of this file

The hosts are network namespaces of this machine (tests/support/hosts.py), each with a rate limit on its card (`tc tbf`). Each
operation of a layout is a job of `bench`, with the MPI of this environment. Needs root. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.session import mpi_name
from mpicoll.bench.formulas import EMPTY, IN_PARTS, parse, spell
from tests.support import ROOT, hosts

FIGURES = ROOT / "benchmarks" / "bandwidth.json"
OPERATIONS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "broadcast", "all_to_all_single")
IMPLEMENTATIONS = {"mpicoll": "mpicoll", "gloo": "Gloo", "mpi4py": "MPI"}  # option of bench -> its name in the figures
JOB_S = 600.0  # limit for one job

# A row of the table: MPI, Mbit/s, hosts x ranks, operation, dtype, bytes -> time over the limit, by implementation.
Figures = dict[str, dict[str, float]]


def network_factor(what: str, node_sizes: Sequence[int]) -> float:
    """Bytes that the busiest network card must send or receive / S. 0: nothing leaves the node."""
    nodes, n, least, most = len(node_sizes), sum(node_sizes), min(node_sizes), max(node_sizes)
    if nodes == 1 or what in EMPTY:
        return 0.0
    if what == "all_reduce":
        return 2 * (nodes - 1) / nodes
    if what in ("all_to_all", "all_to_all_single"):
        return max(k * (n - k) / n for k in (least, most))
    return (n - least) / n if what in IN_PARTS else 1.0


def measure(machines: hosts.Hosts, mbit: int, layout: str, operation: str, options: argparse.Namespace) -> Figures:
    """One job. Raises RuntimeError with what it said if it fails."""
    count, ranks = (int(number) for number in layout.split("x"))
    some = hosts.Hosts(machines.names[:count], machines.pids[:count], machines.folder)
    output = machines.folder / "figures.json"
    command = [
        "--quiet", "--hostfile", str(some.hostfile(ranks)), "-n", str(count * ranks), *options.run_options, "-m", "mpicoll.bench",
        operation, "--sizes", *options.sizes, "--dtypes", *options.dtypes, "--repeat", str(options.repeat),
        "--impl", *options.impl, "--json", str(output),
    ]  # fmt: skip
    done = machines.launch(*command, timeout_s=JOB_S)
    if done.returncode:
        raise RuntimeError(f"{layout}, {operation}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    found = json.loads(output.read_text())
    mpi = mpi_name(found["machine"]["mpi"])
    asked, node_sizes = [parse(size) for size in options.sizes], [ranks] * count
    return {
        f"{mpi}|{mbit}|{layout}|{row['what']}|{row['dtype']}|{nearest(row['bytes'], asked)}": over_the_limit(
            row, mbit, node_sizes
        )
        for row in found["rows"]
    }


def nearest(nbytes: int, sizes: Sequence[int]) -> int:
    """The size that was asked for: 3 ranks cannot share every number of bytes."""
    return min(sizes, key=lambda size: abs(size - nbytes))


def over_the_limit(row: dict[str, Any], mbit: int, node_sizes: Sequence[int]) -> dict[str, float]:
    """The median of the rounds, over the least time in which the cards can move the bytes."""
    limit_us = network_factor(row["what"], node_sizes) * row["bytes"] * 8 / mbit
    ways = {name: way for name, way in row["ways"].items() if name in IMPLEMENTATIONS.values()}
    return {name: round(statistics.median(way["rounds_us"]) / limit_us, 2) for name, way in ways.items()}


def table(figures: Figures) -> str:
    """The figures in Markdown; a line for each layout, operation and dtype, a column for each size."""
    keys = [tuple(key.split("|")) for key in figures]
    sizes = sorted({int(key[5]) for key in keys})
    lines = [f"| MPI | Mbit/s | hosts x ranks | operation | {' | '.join(map(spell, sizes))} |", "|---" * (4 + len(sizes)) + "|"]
    for mpi, mbit, layout, operation, dtype in sorted({key[:5] for key in keys}, key=_order):
        cells = []
        for size in sizes:
            found = figures.get(f"{mpi}|{mbit}|{layout}|{operation}|{dtype}|{size}", {})
            cells.append(" / ".join(f"{found[name]:.2f}" if name in found else "-" for name in IMPLEMENTATIONS.values()))
        what = operation if dtype == "float32" else f"{operation}, {dtype}"
        lines.append(f"| {mpi} | {mbit} | {layout} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _order(key: tuple[str, ...]) -> tuple[object, ...]:
    mpi, mbit, layout, operation, dtype = key
    return mpi.startswith("MPICH"), int(mbit), layout, OPERATIONS.index(operation), dtype != "float32"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of collectives between hosts over the bandwidth limit.")
    parser.add_argument("--mbit", type=int, nargs="+", default=[100], metavar="N", help="rate of the cards in Mbit/s")
    parser.add_argument("--queue-ms", type=int, default=1000, metavar="N", help="length of the queue of a card (tbf's latency)")
    parser.add_argument("--layouts", nargs="+", default=["4x1", "2x2", "2x1"], metavar="HxR", help="hosts x ranks on each")
    parser.add_argument("--operations", nargs="+", default=list(OPERATIONS), choices=OPERATIONS)
    parser.add_argument("--sizes", nargs="+", default=["1MiB", "4MiB", "16MiB"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--impl", nargs="+", default=list(IMPLEMENTATIONS), choices=list(IMPLEMENTATIONS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--run-options", type=str.split, default=[], metavar="WORDS", help="options of mpicoll.run, in one word")
    parser.add_argument("--write", action="store_true", help="put the figures into benchmarks/bandwidth.json")
    parser.add_argument("--table", action="store_true", help="measure nothing, and print the table of benchmarks/bandwidth.json")
    options = parser.parse_args()
    if options.table:
        print(table(recorded()), end="")
        return
    if reason := hosts.missing():
        raise SystemExit(reason)
    for size in options.sizes:
        parse(size)
    most = max(int(layout.split("x")[0]) for layout in options.layouts)
    with tempfile.TemporaryDirectory() as folder, hosts.hosts(most, Path(folder)) as machines:
        for mbit in options.mbit:
            machines.limit(mbit, options.queue_ms)
            for layout in options.layouts:
                for operation in options.operations:
                    found = measure(machines, mbit, layout, operation, options)
                    print(table(found).splitlines()[-1], flush=True)
                    if options.write:
                        write(found)


def recorded() -> Figures:
    figures: Figures = json.loads(FIGURES.read_text())
    return figures


def write(found: Figures) -> None:
    """Adds the figures to those of the file: for a row that is there already, only the implementations measured now change."""
    known = recorded()
    for row, ways in found.items():
        known[row] = {**known.get(row, {}), **ways}
    FIGURES.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
