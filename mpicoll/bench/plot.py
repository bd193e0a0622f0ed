"""Curves of time and bandwidth over size, each table a pair of panels, with the memory copy as the limit."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from mpicoll.bench import formulas
from mpicoll.bench.machine import Machine
from mpicoll.bench.row import COPY, DOOR_1, DOOR_2, FLOAT32, GLOO, NCCL, RAW, Row

COLOURS = {DOOR_1: "C0", DOOR_2: "C1", GLOO: "C2", RAW: "C3", FLOAT32: "C4", NCCL: "C5", COPY: "black"}
REMEDY = "--plot needs matplotlib: pip install 'mpicoll[bench]'"
PANEL = (6.0, 4.0)  # inches


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(rows: Sequence[Row], machine: Machine, file: str) -> None:
    """Writes ``file`` in the format of its ending (rank 0 alone)."""
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")

    tables: dict[str, list[Row]] = {}
    for row in rows:
        if row.nbytes and row.what != "overlap" and not row.what.startswith("DDP"):
            tables.setdefault(" ".join(filter(None, (row.what, row.dtype, row.op))), []).append(row)
    if not tables:
        return
    size = (2 * PANEL[0], PANEL[1] * len(tables))
    figure, panels = plt.subplots(len(tables), 2, figsize=size, squeeze=False, layout="constrained")
    for (name, found), (left, right) in zip(tables.items(), panels, strict=True):
        found.sort(key=lambda row: row.nbytes)
        _curves(left, found, name, "microseconds per call", lambda row, way: row.seconds(way) * 1e6)
        _curves(right, found, name, "bus bandwidth, GB/s", lambda row, way: row.bus_bandwidth(way) / 1e9)
    figure.suptitle("\n".join(machine.lines()), fontsize="small")
    figure.savefig(file)
    plt.close(figure)


def _curves(panel: Any, rows: Sequence[Row], name: str, label: str, figure: Any) -> None:
    for way, colour in COLOURS.items():
        points = [(row.nbytes, figure(row, way)) for row in rows if way in row.times]
        style = {"linestyle": "--", "label": "memory copy (limit)"} if way == COPY else {"marker": ".", "label": way}
        if points:
            panel.plot(*zip(*points, strict=True), color=colour, **style)
    panel.set(xscale="log", yscale="log", title=name, xlabel="bytes", ylabel=label)
    ticks = sorted({row.nbytes for row in rows})
    panel.set_xticks(ticks, [formulas.spell(nbytes) for nbytes in ticks], rotation=45, fontsize="x-small")
    panel.minorticks_off()
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")
