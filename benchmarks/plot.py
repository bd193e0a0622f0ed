"""Draws the figures of a file that `mpicoll bench OPERATION --json FILE` has written: time over size. Needs matplotlib.

    python -m benchmarks.plot FIGURES.json PICTURE.svg

Lines are medians of the rounds, bands reach from the least to the most. The colours are those of Okabe and Ito, which people with
any colour vision can distinguish; markers differ too.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.session import read_row
from mpicoll.bench.formulas import spell
from mpicoll.bench.row import API, GLOO, NCCL, RAW, Row

LOOKS = {  # label, colour, marker; the torch backend differs from the mpicoll API by some microseconds
    API: ("mpicoll", "#0072B2", "o"),
    GLOO: ("Gloo", "#D55E00", "s"),
    NCCL: ("NCCL", "#009E73", "D"),
    RAW: ("raw MPI", "#555555", "^"),
}
INK = "#222222"


def draw(facts: dict[str, Any], file: str) -> None:
    """Writes ``file`` in the format of its ending; the same figures make the same file."""
    rows = sorted(map(read_row, facts["rows"]), key=lambda row: row.nbytes)
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    with matplotlib.rc_context({"svg.hashsalt": "mpicoll", "axes.spines.top": False, "axes.spines.right": False}):
        figure, panel = importlib.import_module("matplotlib.pyplot").subplots(figsize=(8.0, 4.4), layout="constrained")
        for way, (label, colour, marker) in LOOKS.items():
            curve = [(row.nbytes, [second * 1e6 for second in row.times[way]]) for row in rows if way in row.times]
            if curve:
                sizes, series = zip(*curve, strict=True)
                least, middle, most = ([function(us) for us in series] for function in (min, statistics.median, max))
                panel.plot(sizes, middle, label=label, color=colour, marker=marker, markersize=4, linewidth=1.6)
                panel.fill_between(sizes, least, most, color=colour, alpha=0.18, linewidth=0)
        panel.set(xscale="log", yscale="log", xlabel="message size", ylabel="time per call, microseconds")
        ticks = sorted({row.nbytes for row in rows})[::-1][::2]
        panel.set_xticks(ticks, [spell(nbytes) for nbytes in ticks], fontsize=8)
        panel.minorticks_off()
        panel.grid(alpha=0.25)
        panel.legend(frameon=False)
        panel.set_title(headline(rows), loc="left", fontsize=11, fontweight="bold", color=INK)
        figure.supxlabel(_caption(facts["machine"], rows), fontsize=7, color=INK)
        metadata = {"metadata": {"Date": None}} if file.endswith(".svg") else {}
        figure.savefig(file, facecolor="white", **metadata)


def headline(rows: Sequence[Row]) -> str:
    """What the picture says, as a sentence: the ratios at the largest size."""
    last = rows[-1]
    others = [(LOOKS[way][0], ratio) for way in (GLOO, NCCL, RAW) if (ratio := last.ratio(API, way)) is not None]
    words = ", and ".join(f"{ratio:.2g} times {label}'s" for label, ratio in others)
    return f"{last.what} of {spell(last.nbytes)}, {last.dtype}: mpicoll's time is {words}"


def _caption(machine: dict[str, Any], rows: Sequence[Row]) -> str:
    mpi, rounds = machine["mpi"].split(", package")[0], min(len(row.times[API]) for row in rows)
    where = f"{machine['ranks']} ranks, {machine['cores']} cores ({machine['cpu']}); {mpi}; torch {machine['torch']}"
    return f"{where}\nlines: median of {rounds} rounds or more; bands: least to most"


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
