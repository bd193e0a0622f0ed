"""Estimates the time of each algorithm on another machine, and the sizes from which another algorithm is faster.

It measures nothing and starts no ranks. docs/model.md has the formulas, their symbols and what they leave out.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mpicoll.bench import arguments, formulas
from mpicoll.bench.model import page
from mpicoll.bench.model.algorithms import OPERATIONS, best, take_overs
from mpicoll.bench.model.costs import ModelMachine
from mpicoll.bench.model.page import GB, US, about, describe, list_take_overs
from mpicoll.bench.table import micro

SIZES = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 128 << 20, 1 << 30]  # bytes


class Network(NamedTuple):
    latency_us: float
    bandwidth_gb: float  # of a network card, in each direction
    gap_us: float  # between two messages of a card


# Rounded. Latency: of MPI. Bandwidth: line rate of the card. Gap: of the card; with TCP the time of a system call.
NETWORKS = {
    "slingshot": Network(2.0, 25.0, 0.01),  # 200 Gb/s
    "infiniband": Network(1.5, 12.5, 0.01),  # HDR100
    "ethernet10": Network(15.0, 1.25, 1.0),  # TCP
    "ethernet1": Network(30.0, 0.125, 1.0),  # TCP
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `bench model`."""
    parser.description = __doc__

    def add(name: str, unit: str, text: str, type: Callable[[str], float], default: float | None = None) -> None:
        said = text if default is None else f"{text}; default {default:g}"
        parser.add_argument(name, type=type, default=default, metavar=unit, help=said)

    add("--nodes", "N", "number of nodes", arguments.count, 16)
    add("--ranks-per-node", "R", "ranks on each node", arguments.count, 64)
    parser.add_argument(
        "--network", choices=NETWORKS, default="infiniband", help="sets the next three options; default infiniband"
    )
    add("--latency", "US", "latency of a message between nodes, microseconds", arguments.number)
    add("--bandwidth", "GB/s", "bandwidth of the network card of a node, in each direction", arguments.positive)
    add("--gap", "US", "time between two messages of one card, microseconds", arguments.number)
    add("--node-latency", "US", "latency of a message within a node, microseconds", arguments.number, 0.5)
    parser.add_argument(
        "--node-copies", type=int, choices=(1, 2), default=2, help="copies of a message within a node; 1: CMA or XPMEM; default 2"
    )
    add("--memory-bandwidth", "GB/s", "memory bandwidth of a node, reads plus writes", arguments.positive, 300.0)
    add("--core-bandwidth", "GB/s", "memory bandwidth of one core", arguments.positive, 20.0)
    add("--call", "US", "time of one Python call, microseconds", arguments.number, 1.0)
    parser.add_argument("--operation", choices=OPERATIONS, default="all_reduce", help="the operation; default all_reduce")
    sizes = "8 64KiB 1MiB ...; bytes of the tensor, or of the parts of all ranks together"
    parser.add_argument("--sizes", type=arguments.size, nargs="+", default=SIZES, metavar="S", help=sizes)
    parser.add_argument("--csv", metavar="FILE", help="write a line for each size and algorithm")
    parser.add_argument("--plot", metavar="FILE.png", help="draw time over size (needs matplotlib)")
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables of docs/model.md, for the machines of that page"
    )
    parser.set_defaults(refuse=parser.error)


def main(options: argparse.Namespace) -> int:
    """Prints the table. Exits with status 2 and one line for a machine that cannot be."""
    if options.markdown:
        print(page.markdown())
        return 0
    machine = _machine(options)
    if machine.size < 2:
        options.refuse("--nodes 1 --ranks-per-node 1: one rank has nobody to send to; use two ranks or more")
    sizes = sorted(set(options.sizes))
    print("\n".join([_where(machine), "", *table(options.operation, machine, sizes)]))
    print("\n".join(["", "where each takes over:", *_take_over_lines(options.operation, machine, sizes)]))
    if options.csv:
        _write(options.csv, options.operation, machine, sizes)
    if options.plot:
        _draw(options.plot, options.operation, machine, sizes)
    return 0


def _machine(options: argparse.Namespace) -> ModelMachine:
    chosen = (options.latency, options.bandwidth, options.gap)
    network = (own if own is not None else default for own, default in zip(chosen, NETWORKS[options.network], strict=True))
    latency_us, bandwidth_gb, gap_us = network
    return ModelMachine(
        options.nodes,
        options.ranks_per_node,
        latency_us * US,
        bandwidth_gb * GB,
        gap_us * US,
        options.node_latency * US,
        options.memory_bandwidth * GB,
        options.core_bandwidth * GB,
        options.node_copies,
        options.call * US,
    )


def _where(machine: ModelMachine) -> str:
    nodes = f"{machine.nodes} node{'s' if machine.nodes > 1 else ''}"
    ranks = f"{machine.ranks} rank{'s' if machine.ranks > 1 else ''}"
    return f"{nodes} x {ranks}; {describe(machine)}"


def table(operation: str, machine: ModelMachine, sizes: Sequence[int]) -> list[str]:
    """A line of microseconds for each size, the best marked. Algorithms that need another number of nodes have no column."""
    algorithms = [algorithm for algorithm in OPERATIONS[operation] if algorithm.where(machine)]
    widths = [max(len(algorithm.name), 10) + 3 for algorithm in algorithms]
    names = "".join(f"{algorithm.name:>{width - 1}} " for algorithm, width in zip(algorithms, widths, strict=True))
    lines = [f"{operation}, microseconds by the model; *: the best; -: fewer elements than ranks", f"{'bytes':>9}{names}"]
    for nbytes in sizes:
        chosen = best(operation, machine, nbytes)
        cells = [_cell(algorithm.cost(machine, nbytes), algorithm is chosen) for algorithm in algorithms]
        lines.append(f"{formulas.spell(nbytes):>9}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return [line.rstrip() for line in lines]


def _cell(seconds: float, chosen: bool) -> str:
    if not math.isfinite(seconds):
        return "- "
    return micro(seconds) + ("*" if chosen else " ")


def _take_over_lines(operation: str, machine: ModelMachine, sizes: Sequence[int]) -> list[str]:
    ranges = take_overs(operation, machine, sizes)
    if not ranges:
        return ["  nowhere: there are fewer elements than ranks"]
    lines = [f"  from {about(over.nbytes)}: {over.name}, after {over.after}" for over in ranges if over.after is not None]
    return [f"  at {about(ranges[0].nbytes)}: {ranges[0].name}", *lines]


def _write(file: str, operation: str, machine: ModelMachine, sizes: Sequence[int]) -> None:
    with Path(file).open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["operation", "nodes", "ranks_per_node", "bytes", "algorithm", "seconds", "best"])
        for nbytes in sizes:
            chosen = best(operation, machine, nbytes)
            for algorithm in OPERATIONS[operation]:
                seconds = algorithm.cost(machine, nbytes)
                if math.isfinite(seconds):
                    facts = [operation, machine.nodes, machine.ranks, nbytes, algorithm.name, seconds, int(algorithm is chosen)]
                    writer.writerow(facts)


def _draw(file: str, operation: str, machine: ModelMachine, sizes: Sequence[int]) -> None:
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")

    figure, panel = plt.subplots(figsize=(8.0, 5.0), layout="constrained")
    for algorithm in OPERATIONS[operation]:
        costs = [(nbytes, algorithm.cost(machine, nbytes) / US) for nbytes in sizes]
        points = [point for point in costs if math.isfinite(point[1])]
        if points:
            panel.plot(*zip(*points, strict=True), marker=".", label=algorithm.name)
    for over in take_overs(operation, machine, sizes)[1:]:
        panel.axvline(over.nbytes, color="gray", linestyle=":", linewidth=1)
    panel.set(xscale="log", yscale="log", xlabel="bytes", ylabel="microseconds by the model")
    panel.set_title(f"{operation}: {list_take_overs(operation, machine, sizes)}\n{_where(machine)}", fontsize="x-small")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    figure.savefig(file)
    plt.close(figure)
