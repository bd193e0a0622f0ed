"""Makes the table of docs/guides/gpus.md from the reports that run.py wrote beside this file: ``python tests/gpu/table.py``.

    machine     {gpu, gpus, torch, cuda}
    device      "cuda"; a trial of the tests themselves on the "cpu" says nothing here
    when        a date
    mpis        {name: {version, verdict: {moves, evidence}, paths}}
    paths       {path: {tests: {ranks: {status, passed, failed, ...}}, bench: {what: {bytes: {way: us}}}}}

Any part may be {"not run": reason} instead, and a time the reason itself; a cell then says so. What a report lacks was not run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from tests.support import pages  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "gpus.md"
NAME = "gpu table"  # in the page

PATHS = {
    "direct": "**direct**: MPI is handed GPU memory",
    "ipc": "**IPC**: ranks of a node open each other's GPU memory",
    "staged": "**staged**: through pinned host memory",
}
RANKS = (2, 4)
SIZE, NBYTES = "256 MiB", 256 << 20
OURS, COPY, BUS, HOST = "mpicoll", "copy", "bus", "MPI"  # of mpicoll/bench/row.py
FAILED, TIMED_OUT = 1, 124  # statuses: pytest's where tests have failed, run.py's for what it had to end
LONGEST = 160  # characters of a reason
COLUMNS = (
    "",
    "MPI",
    f"tests on {RANKS[0]} ranks",
    f"on {RANKS[1]}",
    f"send of {SIZE}, to its parts",
    f"all_reduce of {SIZE}, to a device copy, to staged",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n".replace("|  |", "| |")

Part = Mapping[str, Any]  # of a report


class Missing(Exception):
    """There is no such figure; the text is what its cell says."""


def main() -> None:
    parser = argparse.ArgumentParser(description="prints the README's table of GPUs, from tests/gpu/report-*.json")
    parser.add_argument("--write", action="store_true", help="put it between the two marks of docs/guides/gpus.md")
    made = markdown(reports())
    if parser.parse_args().write:
        pages.put(PAGE, NAME, made)
    else:
        print(made, end="")


def reports(folder: Path = HERE) -> list[Part]:
    """Those of a GPU."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]
    return [report for report in found if report["device"] == "cuda"]


def markdown(found: list[Part]) -> str:
    """A table for each machine; without any, one that says so."""
    return "\n".join(f"{machine(report)}\n\n{table(report)}" for report in found) or empty("no GPU was there")


def machine(report: Part) -> str:
    it = report["machine"]
    return f"{it['gpus']} x {it['gpu']}, torch {it['torch']}, CUDA {it['cuda']}, {report['when']}:"


def table(report: Part) -> str:
    """A row for each path and MPI."""
    if not report["mpis"]:
        return empty("no MPI was there")
    return HEAD + "".join(row(path, name, mpi) for path in PATHS for name, mpi in report["mpis"].items())


def empty(reason: str) -> str:
    return HEAD + "".join(unrun(path, "-", not_run(reason)) for path in PATHS)


def row(path: str, name: str, mpi: Part) -> str:
    try:
        paths = part(mpi, "paths", "paths")
        here = part(paths, path, f"path {path}")
    except Missing as missing:
        return unrun(path, library(name, mpi), str(missing))
    runs = [cell(tests, here, ranks) for ranks in RANKS]
    return line(path, library(name, mpi), [*runs, cell(send, here), cell(all_reduce, here, paths)])


def unrun(path: str, mpi: str, why: str) -> str:
    return line(path, mpi, [why, "not run", "not run", "not run"])


def line(path: str, mpi: str, cells: list[str]) -> str:
    return f"| {' | '.join([PATHS[path], mpi, *cells])} |\n"


# -- cells -------------------------------------------------------------------------------------------------------------


def cell(make: Callable[..., str], *given: Any) -> str:
    try:
        return make(*given)
    except Missing as missing:
        return str(missing)


def library(name: str, mpi: Part) -> str:
    """The name tells two builds of one version apart."""
    words = f"{plain(mpi['version'])} ({name})" if "version" in mpi else name
    if "verdict" in mpi:
        words += ", CUDA-aware" if mpi["verdict"]["moves"] else ", not CUDA-aware"
    return words


def tests(path: Part, ranks: int) -> str:
    """How many passed. Bold: whatever else became of them; a status of 0 alone is no proof."""
    run = part(part(path, "tests", "tests"), str(ranks), f"run on {ranks} ranks")
    counts = {kind: number for kind in ("passed", "skipped", "deselected") if (number := run.get(kind, 0))}
    failed = sum(run.get(kind, 0) for kind in ("failed", "error", "errors"))
    wrong = [f"{failed} failed"] if failed else []
    if run["status"] and not (run["status"] == FAILED and failed):
        wrong.append(ended(run["status"]))
    if not wrong and not counts.get("passed"):
        wrong.append("none ran")
    return ", ".join([*(f"**{words}**" for words in wrong), *(f"{number} {kind}" for kind, number in counts.items())])


def send(path: Part) -> str:
    """`bench latency` is half of a round trip: one message's way. And how much of what the slower of its parts would do."""
    ours = microseconds(path, "latency")
    return f"{figure(NBYTES / ours / 1e3)} GB/s, {share(path, ours)}"


def share(path: Part, ours: float) -> str:
    try:
        return f"{100 * max(microseconds(path, 'latency', way) for way in (BUS, HOST)) / ours:.0f} %"
    except Missing:
        return "-"


def all_reduce(path: Part, paths: Part) -> str:
    ours = microseconds(path, "all_reduce")
    others = [(path, COPY), (paths.get("staged", {}), OURS)]
    return ", ".join([f"{figure(ours / 1e3)} ms", *(cell(ratio, ours, other, way) for other, way in others)])


def ratio(ours: float, other: Part, way: str) -> str:
    try:
        return f"{figure(ours / microseconds(other, 'all_reduce', way))}x"
    except Missing:
        return "-"


# -- what a report says ------------------------------------------------------------------------------------------------


def microseconds(path: Part, what: str, way: str = OURS) -> float:
    measured = part(part(path, "bench", "benchmarks"), what, f"{what} among its benchmarks")
    return float(part(part(measured, str(NBYTES), f"{what} of {SIZE}"), way, f"{way} for {what}"))


def part(of: Part, key: str, words: str) -> Any:
    """What stands there.

    Raises: Missing: it, or what it is part of, was not run, or failed; or the report has no such thing, in ``words``.
    """
    if "not run" in of:
        raise Missing(not_run(of["not run"]))
    if key not in of and "status" in of:  # the whole job's
        raise Missing(f"**{ended(of['status'])}**")
    found = of.get(key, f"the report has no {words}")
    if isinstance(found, str):
        raise Missing(not_run(found))
    if isinstance(found, Mapping) and "not run" in found:
        raise Missing(not_run(found["not run"]))
    return found


def ended(status: int) -> str:
    return "did not end in time" if status == TIMED_OUT else f"ended with status {status}"


def not_run(reason: str) -> str:
    return f"not run: {plain(reason)}"


def plain(text: str) -> str:
    """For a cell."""
    return " ".join(text.split()).replace("|", "\\|")[:LONGEST]


def figure(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


if __name__ == "__main__":
    main()
