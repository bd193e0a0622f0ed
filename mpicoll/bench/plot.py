"""Plots: the time of one operation over size, or the ratios of several operations to Gloo and to raw MPI.

Lines are medians of the rounds, bands reach from the least to the most. The colours are those of Okabe and Ito, which people with
any colour vision can distinguish; markers differ too, and each line has a label at its end.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Any

from mpicoll.bench import formulas
from mpicoll.bench.machine import Machine
from mpicoll.bench.row import API, BACKEND, COPY, FLOAT32, GLOO, NCCL, RAW, Row

REMEDY = "--plot needs matplotlib: pip install 'mpicoll[bench]'"
HERO = (8.0, 4.4)  # inches
PANEL = (3.6, 2.5)
COLUMNS = 3
INK = "#222222"


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    marker: str


LOOKS = {
    API: Look("mpicoll", "#0072B2", "o"),
    BACKEND: Look("torch backend", "#56B4E9", "v"),
    GLOO: Look("Gloo", "#D55E00", "s"),
    RAW: Look("raw MPI", "#555555", "^"),
    NCCL: Look("NCCL", "#009E73", "D"),
    FLOAT32: Look("mpicoll, float32", "#CC79A7", "P"),
    COPY: Look("memory copy", "#999999", "."),
}
LABELS = {look.label for look in LOOKS.values()}
POINTS_PER_INCH, LABEL_HEIGHT = 72, 11.0  # points
SHOWN = (API, GLOO, NCCL, RAW)  # of one operation; the torch backend differs from the mpicoll API by some microseconds
Curve = list[tuple[int, list[float]]]  # size in bytes, a figure of each round


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(rows: Sequence[Row], machine: Machine, file: str) -> None:
    """Writes ``file`` in the format of its ending (rank 0 alone). Does nothing if no row has a size."""
    tables: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.nbytes):
        if row.nbytes and row.what != "overlap" and not row.what.startswith("DDP"):
            tables.setdefault(" ".join(filter(None, (row.what, row.dtype, row.op))), []).append(row)
    if not tables:
        return
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    with matplotlib.rc_context({"svg.hashsalt": "mpicoll", "axes.spines.top": False, "axes.spines.right": False}):
        figure = _times(*tables.values()) if len(tables) == 1 else _ratios(tables)
        figure.draw_without_rendering()  # so that the ends of the lines have their places
        for panel in figure.axes:
            _label_lines(panel)
        figure.supxlabel("\n".join(_caption(machine, len(next(iter(rows[0].times.values()))))), fontsize=7, color=INK)
        metadata = {"metadata": {"Date": None}} if file.endswith(".svg") else {}  # the same figures make the same file
        figure.savefig(file, facecolor="white", **metadata)


# --- one operation: time over size ------------------------------------------------------------------------------------


def _times(rows: list[Row]) -> Any:
    figure, panel = importlib.import_module("matplotlib.pyplot").subplots(figsize=HERO, layout="constrained")
    for way in SHOWN:
        _line(panel, LOOKS[way], [(row.nbytes, [s * 1e6 for s in row.times[way]]) for row in rows if way in row.times])
    panel.set(xscale="log", yscale="log", xlabel="message size", ylabel="time per call, microseconds")
    _sizes(panel, rows)
    panel.set_title(headline(rows), loc="left", fontsize=11, fontweight="bold", color=INK)
    return figure


def headline(rows: Sequence[Row]) -> str:
    """What the picture says, as a sentence: the ratios at the largest size."""
    last = rows[-1]
    others = [(LOOKS[way].label, ratio) for way in (GLOO, NCCL, RAW) if (ratio := last.ratio(API, way)) is not None]
    kind = f" of {last.dtype}" if last.dtype not in ("", "float32") else ""
    if not others:
        return f"{last.what}{kind}: time over message size"
    words = ", and ".join(f"{ratio:.2g} times {label}'s" for label, ratio in others)
    return f"{last.what}{kind} of {formulas.spell(last.nbytes)}: mpicoll's time is {words}"


# --- several operations: ratios over size -----------------------------------------------------------------------------


def _ratios(tables: dict[str, list[Row]]) -> Any:
    lines = -(-len(tables) // COLUMNS)
    size = (COLUMNS * PANEL[0], lines * PANEL[1] + 0.8)
    figure, panels = importlib.import_module("matplotlib.pyplot").subplots(
        lines, COLUMNS, figsize=size, sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for panel in panels.flat[len(tables) :]:
        panel.set_axis_off()
    for (name, rows), panel in zip(tables.items(), panels.flat, strict=False):
        panel.axhline(1, color=INK, linewidth=0.8)
        for other in (GLOO, NCCL, RAW):
            compared = [row for row in rows if {API, other} <= row.times.keys()]
            _line(panel, LOOKS[other], [(row.nbytes, list(map(truediv, row.times[API], row.times[other]))) for row in compared])
        panel.set_xscale("log")
        panel.set_yscale("log", base=2)
        panel.set_title(name, loc="left", fontsize=9, color=INK)
    everything = [row for rows in tables.values() for row in rows]
    for panel in panels.flat[: len(tables)]:
        _sizes(panel, everything, 4)
    panels[0][0].yaxis.set_major_formatter(_plain)
    figure.suptitle("Time of mpicoll divided by the time of Gloo and of raw MPI. Below the line, mpicoll is faster.", color=INK)
    return figure


def _plain(value: float, position: int) -> str:
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"


# --- shared -----------------------------------------------------------------------------------------------------------


def _line(panel: Any, look: Look, curve: Curve) -> None:
    if not curve:
        return
    sizes, figures = zip(*curve, strict=True)
    least, middle, most = ([function(series) for series in figures] for function in (min, statistics.median, max))
    panel.plot(sizes, middle, label=look.label, color=look.colour, marker=look.marker, markersize=4, linewidth=1.6)
    panel.fill_between(sizes, least, most, color=look.colour, alpha=0.18, linewidth=0)


def _label_lines(panel: Any) -> None:
    """A label at the end of each line; where ends are close, labels stand one above the other."""
    above = float("-inf")
    labelled = [line for line in panel.get_lines() if line.get_label() in LABELS]
    for line in sorted(labelled, key=lambda line: float(line.get_ydata()[-1])):
        end = line.get_xdata()[-1], line.get_ydata()[-1]
        height = panel.transData.transform(end)[1] * POINTS_PER_INCH / panel.figure.dpi
        above = max(height, above + LABEL_HEIGHT)
        panel.annotate(
            line.get_label(), end, xytext=(6, above - height), textcoords="offset points",
            color=line.get_color(), va="center", fontsize=9, fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def _caption(machine: Machine, rounds: int) -> list[str]:
    first, second = machine.lines()
    return [f"{first.split(', package')[0]}; {second}", f"lines: median of {rounds} rounds; bands: least to most"]


def _sizes(panel: Any, rows: Sequence[Row], most: int = 8) -> None:
    """At most so many ticks, at sizes that were measured, in words."""
    sizes = sorted({row.nbytes for row in rows})
    step = -(-len(sizes) // most)
    ticks = sizes[::-1][::step][::-1]
    panel.set_xticks(ticks, [formulas.spell(nbytes) for nbytes in ticks], fontsize=8)
    panel.minorticks_off()
    panel.grid(alpha=0.25)
