"""The tables of docs/model.md: formulas, the sizes from which each algorithm is best, times from 1 node to 1,024."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpicoll.bench import table
from mpicoll.bench.model.algorithms import ITEM, OPERATIONS, best, take_overs
from mpicoll.bench.model.costs import ModelMachine

NODES = (1, 2, 4, 16, 64, 256, 1024)
RANKS = (64, 2)  # per node
LEAST, MOST = 4, 1 << 30  # bytes
SIZES = (8, 64 << 10, 1 << 20, 64 << 20)
IN_PARTS_SIZES = (1 << 20, 64 << 20, 1 << 30)  # of all parts; at least 16 bytes for each of 65,536 ranks
WHOLE = ("all_reduce", "all_reduce_half_precision", "broadcast")  # operations whose tensor is not split among the ranks
MACHINE = ModelMachine(1, 1)  # nodes and ranks are replaced
US, GB = 1e-6, 1e9


def describe(machine: ModelMachine) -> str:
    """The figures of a machine, without its numbers of nodes and ranks."""
    copies = "1 copy" if machine.copies == 1 else f"{machine.copies} copies"
    return (
        f"network {machine.latency_s / US:g} us, {machine.bandwidth / GB:g} GB/s, {machine.gap_s / US:g} us a message; "
        f"node {machine.node_latency_s / US:g} us, {copies} a message; memory {machine.memory_bandwidth / GB:g} GB/s, "
        f"{machine.core_bandwidth / GB:g} GB/s per core; {machine.call_s / US:g} us a call"
    )


def about(nbytes: float) -> str:
    """12345 -> "12.1 KiB", in three digits."""
    return _scaled(nbytes, {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1})


def spell_time(seconds: float) -> str:
    """0.00001234 -> "12.3 us"; infinity -> "-"."""
    return _scaled(seconds, {"s": 1.0, "ms": 1e-3, "us": 1e-6}) if math.isfinite(seconds) else "-"


def _scaled(value: float, units: Mapping[str, float]) -> str:
    """In the first unit that is not larger, or the last."""
    name = next((name for name, unit in units.items() if value >= unit), [*units][-1])
    scaled = value / units[name]
    return f"{scaled:.0f} {name}" if scaled >= 100 else f"{scaled:.3g} {name}"


def list_take_overs(operation: str, machine: ModelMachine, sizes: Sequence[int]) -> str:
    """ "recursive doubling; from 4.5 KiB ring"."""
    ranges = take_overs(operation, machine, sizes)
    return "; ".join(over.name if over.after is None else f"from {about(over.nbytes)} {over.name}" for over in ranges) or "-"


def markdown() -> str:
    """The text between the markers of the page."""
    return "\n".join([*_formulas(), *_take_overs(), *_times()])


def _formulas() -> list[str]:
    lines = ["## Formulas", ""]
    for operation, algorithms in OPERATIONS.items():
        rows = [(algorithm.name, algorithm.formula, algorithm.textbook or "-") for algorithm in algorithms]
        lines += [*table.markdown([operation, "R ranks a node", "R = 1, g = 0, p a power of two"], rows), ""]
    return lines


def _machines(ranks: int) -> list[ModelMachine]:
    return [replace(MACHINE, nodes=nodes, ranks=ranks) for nodes in NODES]


def _take_overs() -> list[str]:
    lines = [
        "## Sizes from which each is best",
        "",
        f"On this machine: {describe(MACHINE)}.",
        f"From {about(LEAST)} (where the tensor is split among the ranks: {ITEM} bytes a rank) to {about(MOST)}.",
        "",
    ]
    for operation in OPERATIONS:
        columns = [[list_take_overs(operation, machine, (LEAST, MOST)) for machine in _machines(ranks)] for ranks in RANKS]
        heads = [f"{operation}: nodes", *(f"{ranks} ranks a node" for ranks in RANKS)]
        rows = [(f"{nodes:,}", *cells) for nodes, *cells in zip(NODES, *columns, strict=True)]
        lines += [*table.markdown(heads, rows), ""]
    return lines


def _times() -> list[str]:
    lines = ["## Times", "", "The same machine; the best of a column and size in bold."]
    for operation in OPERATIONS:
        for ranks in RANKS:
            heads = [operation, "", *(f"{nodes:,} node{'s' if nodes > 1 else ''}" for nodes in NODES)]
            sizes = SIZES if operation in WHOLE else IN_PARTS_SIZES
            rows = [row for nbytes in sizes for row in _rows(operation, _machines(ranks), nbytes)]
            lines += ["", f"<details><summary>{operation}, {ranks} ranks a node</summary>", "", *table.markdown(heads, rows), ""]
            lines += ["</details>"]
    return lines


def _rows(operation: str, machines: Sequence[ModelMachine], nbytes: int) -> list[tuple[str, ...]]:
    chosen = [best(operation, machine, nbytes) for machine in machines]
    rows = []
    for algorithm in OPERATIONS[operation]:
        times = [spell_time(algorithm.cost(machine, nbytes)) for machine in machines]
        if set(times) != {"-"}:
            cells = [f"**{time}**" if one is algorithm else time for time, one in zip(times, chosen, strict=True)]
            rows.append((about(nbytes), algorithm.name, *cells))
    return rows
