"""python -m mpicoll.bench model: what each algorithm would cost on a machine that is not at hand, and where another takes over.

Nothing is measured here, and no MPI is called: docs/model.md has the formulas, the symbols and what they leave out.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpicoll.bench import arguments, formulas, model_page
from mpicoll.bench.model_algorithms import OPERATIONS, best, take_overs
from mpicoll.bench.model_formulas import Machine
from mpicoll.bench.model_page import GB, US, about, describe, list_take_overs

SIZES = [8, 64, 512, 4 << 10, 32 << 10, 256 << 10, 2 << 20, 16 << 20, 128 << 20, 1 << 30]  # bytes
REMEDY = "--plot needs matplotlib: pip install 'mpicoll[bench]'"


@dataclass(frozen=True)
class Network:
    latency_us: float
    bandwidth_gb: float  # of a card, each direction
    gap_us: float  # between messages of a card


# Round numbers of an MPI's latency and a card's line rate; the gap is a card's, and with TCP a system call's.
NETWORKS = {
    "slingshot": Network(2.0, 25.0, 0.01),  # 200 Gb/s
    "infiniband": Network(1.5, 12.5, 0.01),  # HDR100
    "ethernet10": Network(15.0, 1.25, 1.0),  # TCP
    "ethernet1": Network(30.0, 0.125, 1.0),  # TCP
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this command."""
    parser.description = __doc__
    add = parser.add_argument
    add("--nodes", type=arguments.count, default=16, metavar="N", help="default 16")
    add("--ranks-per-node", type=arguments.count, default=64, metavar="R", help="default 64")
    add("--network", choices=list(NETWORKS), default="infiniband", help="what the next three are by default; default infiniband")
    add("--latency", type=arguments.number, metavar="US", help="of a message between nodes, microseconds")
    add("--bandwidth", type=arguments.positive, metavar="GB/s", help="of a node's network card, in each direction")
    add("--gap", type=arguments.number, metavar="US", help="between two messages of a card, microseconds")
    add("--node-latency", type=arguments.number, default=0.5, metavar="US", help="of a message within a node; default 0.5")
    add("--node-copies", type=int, choices=(1, 2), default=2, help="of such a message; 1: CMA or XPMEM; default 2")
    add(
        "--memory-bandwidth",
        type=arguments.positive,
        default=300.0,
        metavar="GB/s",
        help="of a node, read and written; default 300",
    )
    add("--core-bandwidth", type=arguments.positive, default=20.0, metavar="GB/s", help="the same, of one core; default 20")
    add("--call", type=arguments.number, default=1.0, metavar="US", help="of one step of Python; default 1")
    add("--operation", choices=list(OPERATIONS), default="all_reduce", help="default all_reduce")
    add(
        "--sizes",
        type=arguments.size,
        nargs="+",
        default=SIZES,
        metavar="S",
        help="8 64KiB 1MiB ...; of the tensor, or of all ranks' parts together",
    )
    add("--csv", metavar="FILE", help="a line for each size and algorithm")
    add("--plot", metavar="FILE.png", help="time over size (needs matplotlib)")
    add("--markdown", action="store_true", help="prints the tables of docs/model.md instead, which have machines of their own")
    parser.set_defaults(refuse=parser.error)


def main(options: argparse.Namespace) -> int:
    """Prints the table. What cannot be is refused by the parser, in one line."""
    if options.markdown:
        print(model_page.markdown())
        return 0
    machine = _machine(options)
    _check(options, machine)
    sizes = sorted(set(options.sizes))
    print("\n".join([_where(machine), "", *table(options.operation, machine, sizes)]))
    print("\n".join(["", "where each takes over:", *_take_over_lines(options.operation, machine, sizes)]))
    if options.csv:
        _write(options.csv, options.operation, machine, sizes)
    if options.plot:
        _draw(options.plot, options.operation, machine, sizes)
    return 0


def _machine(options: argparse.Namespace) -> Machine:
    network = NETWORKS[options.network]

    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Machine(
        options.nodes,
        options.ranks_per_node,
        latency_s=given(options.latency, network.latency_us) * US,
        bandwidth=given(options.bandwidth, network.bandwidth_gb) * GB,
        gap_s=given(options.gap, network.gap_us) * US,
        node_latency_s=options.node_latency * US,
        copies=options.node_copies,
        memory_bandwidth=options.memory_bandwidth * GB,
        core_bandwidth=options.core_bandwidth * GB,
        call_s=options.call * US,
    )


def _check(options: argparse.Namespace, machine: Machine) -> None:
    if machine.size < 2:
        options.refuse("--nodes 1 --ranks-per-node 1: one rank has nobody to send to; two ranks or more")
    for option in ("csv", "plot"):
        file = getattr(options, option)
        if file and not Path(file).absolute().parent.is_dir():
            options.refuse(f"--{option} {file}: there is no such folder")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        options.refuse(REMEDY)


def _where(machine: Machine) -> str:
    nodes = f"{machine.nodes} node{'s' if machine.nodes > 1 else ''}"
    ranks = f"{machine.ranks} rank{'s' if machine.ranks > 1 else ''}"
    return f"{nodes} x {ranks}; {describe(machine)}"


def table(operation: str, machine: Machine, sizes: Sequence[int]) -> list[str]:
    """Microseconds, size by algorithm; the best one marked. What this machine cannot have has no column."""
    algorithms = [algorithm for algorithm in OPERATIONS[operation] if algorithm.where(machine)]
    widths = [max(len(algorithm.name), 10) + 3 for algorithm in algorithms]
    names = "".join(f"{algorithm.name:>{width - 1}} " for algorithm, width in zip(algorithms, widths, strict=True))
    lines = [f"{operation}, microseconds by the model; * the best, - fewer elements than ranks", f"{'bytes':>9}{names}"]
    for nbytes in sizes:
        chosen = best(operation, machine, nbytes)
        cells = [_cell(algorithm.cost(machine, nbytes), algorithm is chosen) for algorithm in algorithms]
        lines.append(f"{formulas.spell(nbytes):>9}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    return [line.rstrip() for line in lines]


def _cell(seconds: float, chosen: bool) -> str:
    if not math.isfinite(seconds):
        return "- "
    us = seconds / US
    return (f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}") + ("*" if chosen else " ")


def _take_over_lines(operation: str, machine: Machine, sizes: Sequence[int]) -> list[str]:
    found = take_overs(operation, machine, sizes)
    if not found:
        return ["  nowhere: there are fewer elements than ranks"]
    lines = [f"  from {about(over.nbytes)}: {over.name}, after {over.after}" for over in found if over.after is not None]
    return [f"  at {about(found[0].nbytes)}: {found[0].name}", *lines]


def _write(file: str, operation: str, machine: Machine, sizes: Sequence[int]) -> None:
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


def _draw(file: str, operation: str, machine: Machine, sizes: Sequence[int]) -> None:
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
