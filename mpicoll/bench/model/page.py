"""The tables of docs/model.md: formulas, the sizes from which each algorithm is best, times from 1 node to 1,024."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{_digits(nbytes / unit)} {name}"
    return f"{_digits(nbytes)} B"


def spell_time(seconds: float) -> str:
    """0.00001234 -> "12.3 us"; infinity -> "-"."""
    if not math.isfinite(seconds):
        return "-"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds / 1e-6)} us"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


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
        lines += [*_table([operation, "R ranks a node", "R = 1, g = 0, p a power of two"], rows), ""]
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
        lines += [*_table(heads, rows), ""]
    return lines


def _times() -> list[str]:
    lines = ["## Times", "", "The same machine; the best of a column and size in bold."]
    for operation in OPERATIONS:
        for ranks in RANKS:
            heads = [operation, "", *(f"{nodes:,} node{'s' if nodes > 1 else ''}" for nodes in NODES)]
            rows = [row for nbytes in _sizes(operation) for row in _rows(operation, _machines(ranks), nbytes)]
            lines += ["", f"<details><summary>{operation}, {ranks} ranks a node</summary>", "", *_table(heads, rows), ""]
            lines += ["</details>"]
    return lines


def _sizes(operation: str) -> tuple[int, ...]:
    return SIZES if operation in WHOLE else IN_PARTS_SIZES


def _rows(operation: str, machines: Sequence[ModelMachine], nbytes: int) -> list[tuple[str, ...]]:
    chosen = [best(operation, machine, nbytes) for machine in machines]
    rows = []
    for algorithm in OPERATIONS[operation]:
        times = [spell_time(algorithm.cost(machine, nbytes)) for machine in machines]
        if set(times) != {"-"}:
            cells = [f"**{time}**" if one is algorithm else time for time, one in zip(times, chosen, strict=True)]
            rows.append((about(nbytes), algorithm.name, *cells))
    return rows


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(heads), "|---" * len(heads) + "|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
