"""`bench summary`: the files that several runs of `all` or `step` wrote by ``--json``, as one table with the spread of the runs.

A figure of the table is the median of the runs, and in brackets the least and the most. Runs with one MPI library share a column.
Needs no ranks.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from mpicoll.bench.machine import mpi_name
from mpicoll.bench.row import BACKEND, GLOO
from mpicoll.bench.table import extremes, markdown, times
from mpicoll.bench.targets import HEAD, spelled, text

Facts = dict[str, Any]
EXPOSED_AT_MOST = 0.35  # exposed communication of a training step / that of Gloo


class WrongFile(Exception):
    """A file was not written by ``bench all --json`` or ``bench step --json``."""


def read(files: Iterable[str]) -> dict[str, list[Facts]]:
    """Returns the runs by MPI library.

    Raises:
        WrongFile: Names the file.
    """
    runs: dict[str, list[Facts]] = {}
    for file in files:
        try:
            facts = json.loads(Path(file).read_text())
            library = mpi_name(facts["machine"]["mpi"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise WrongFile(f"{file}: no figures of `bench all --json` or `bench step --json`: {error}") from None
        if not facts.get("targets") and not facts.get("steps"):
            raise WrongFile(f"{file}: no figures of `bench all --json` or `bench step --json`, but of another benchmark")
        runs.setdefault(library, []).append(facts)
    return runs


def lines(runs: dict[str, list[Facts]], in_markdown: bool) -> list[str]:
    """Returns the tables: targets, then training steps, of whatever the runs have."""
    found = []
    for name, table in (("targets", _targets), ("steps", _steps)):
        measured = {library: having for library, all_runs in runs.items() if (having := [r for r in all_runs if r.get(name)])}
        if measured:
            counts = "; ".join(f"{library}: {len(each)} run{'s' * (len(each) > 1)}" for library, each in measured.items())
            head, rows = table(measured, in_markdown)
            found += ["", counts, "", *(markdown(head, rows) if in_markdown else text(rows, head))]
    return found


def _targets(runs: dict[str, list[Facts]], bold: bool) -> tuple[list[str], list[list[str]]]:
    head = [*HEAD[:4], *runs]
    order = {target["what"]: target for each in runs.values() for run in each for target in run["targets"]}
    return head, [_target(runs, target, bold) for target in order.values()]


def _target(runs: dict[str, list[Facts]], target: Facts, bold: bool) -> list[str]:
    def spell(value: float) -> str:
        return spelled(value, target["unit"])

    cells = []
    for each in runs.values():
        values = [found["value"] for run in each for found in run["targets"] if found["what"] == target["what"]]
        cells.append(_cell(values, spell, target["limit"], bold))
    return [target["number"], target["what"], target["against"], spell(target["limit"]), *cells]


def _steps(runs: dict[str, list[Facts]], bold: bool) -> tuple[list[str], list[list[str]]]:
    head = ["training step", *(f"{library}: {words}" for library in runs for words in ("x Gloo", "exposed ms", "exposed x"))]
    names = dict.fromkeys(step["what"] for each in runs.values() for run in each for step in run["steps"])
    return head, [[name, *(cell for each in runs.values() for cell in _step(each, name, bold))] for name in names]


def _step(runs: Sequence[Facts], name: str, bold: bool) -> list[str]:
    rows = [row for run in runs for row in run["rows"] if row["what"] == name]
    steps = [step for run in runs for step in run["steps"] if step["what"] == name]
    return [
        _cell([row["ways"][BACKEND]["ratios"][GLOO] for row in rows], lambda ratio: f"{times(ratio)}x", None, bold),
        _cell([step["exposed_us"][BACKEND] / 1e3 for step in steps], lambda ms: f"{ms:.1f}", None, bold),
        _cell([step["exposed_ratio"] for step in steps], lambda ratio: f"{times(ratio)}x", EXPOSED_AT_MOST, bold),
    ]


def _cell(values: Sequence[float | None], spell: Callable[[float], str], limit: float | None, bold: bool) -> str:
    """The median of the runs, marked if it is over the limit, and their range."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    median = statistics.median(known)
    middle = spell(median)
    if limit is not None and median > limit:
        middle = f"**{middle}**" if bold else f"{middle} MISSED"
    return middle if len(known) == 1 else f"{middle} {extremes(known, spell)}"
