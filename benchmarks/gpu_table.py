"""Makes the table of docs/guides/gpus.md from the reports of tests/gpu/run.py: ``python -m benchmarks.gpu_table``.

    machine     {gpu, gpus, torch, cuda}
    device      "cuda"; a trial of the tests themselves on the "cpu" says nothing here
    when        a date
    mpis        {name: {version, verdict: {moves, evidence}, paths, host}}
    paths       {path: {tests: {ranks: {status, passed, failed, ...}}, bench: {what: {bytes: {way: us}}}}}
    host        {ranks x threads: {bytes: {way: us}}}, an all_reduce on the CPU; not in the table

A path or a benchmark may be {"not run": reason} instead, and a time the reason itself. What a report lacks was not run.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import pages
from tests.support import ROOT

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
HEAD = (
    f"| | MPI | tests on {RANKS[0]} ranks | on {RANKS[1]} | send of {SIZE}, to its parts"
    f" | all_reduce of {SIZE}, to a device copy, to staged |\n|---|---|---|---|---|---|\n"
)
Part = Mapping[str, Any]  # of a report


def main() -> None:
    parser = argparse.ArgumentParser(description="prints the table of GPUs, from tests/gpu/report-*.json")
    parser.add_argument("--write", action="store_true", help="put it between the two marks of docs/guides/gpus.md")
    made = markdown(reports())
    if parser.parse_args().write:
        pages.put(PAGE, NAME, made)
    else:
        print(made, end="")


def reports(folder: Path = ROOT / "tests" / "gpu") -> list[Part]:
    """Those of a GPU."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("report-*.json"))]
    return [report for report in found if report["device"] == "cuda"]


def markdown(found: list[Part]) -> str:
    """A table for each machine; without any, one that says so."""
    if not found:
        return HEAD + "".join(unrun(path, "-", "no GPU was there") for path in PATHS)
    return "\n".join(f"{machine(report)}\n\n{table(report)}" for report in found)


def machine(report: Part) -> str:
    it = report["machine"]
    return f"{it['gpus']} x {it['gpu']}, torch {it['torch']}, CUDA {it['cuda']}, {report['when']}:"


def table(report: Part) -> str:
    """A row for each path and MPI."""
    return HEAD + "".join(row(path, name, mpi) for path in PATHS for name, mpi in report["mpis"].items())


def row(path: str, name: str, mpi: Part) -> str:
    """``name`` tells two builds of one version apart."""
    library, here = name, mpi["paths"][path]
    if "version" in mpi:
        library = f"{mpi['version']} ({name}), {'' if mpi['verdict']['moves'] else 'not '}CUDA-aware"
    if "not run" in here:
        return unrun(path, library, here["not run"])
    runs = [tests(here["tests"].get(str(ranks))) for ranks in RANKS]
    return line(path, library, [*runs, send(here), all_reduce(here, mpi["paths"].get("staged", {}))])


def unrun(path: str, library: str, reason: str) -> str:
    return line(path, library, [f"not run: {reason}", "not run", "not run", "not run"])


def line(path: str, library: str, cells: list[str]) -> str:
    texts = [" ".join(cell.split()).replace("|", "\\|") for cell in (library, *cells)]
    return f"| {' | '.join([PATHS[path], *texts])} |\n"


# -- cells -------------------------------------------------------------------------------------------------------------


def tests(run: Part | None) -> str:
    """How many passed. Bold: whatever else became of them; a status of 0 alone is no proof."""
    if run is None:
        return "not run"
    counts = {kind: number for kind in ("passed", "skipped", "deselected") if (number := run.get(kind, 0))}
    failed = sum(run.get(kind, 0) for kind in ("failed", "error", "errors"))
    wrong = [f"{failed} failed"] if failed else []
    if run["status"] and not (run["status"] == FAILED and failed):
        wrong.append("did not end in time" if run["status"] == TIMED_OUT else f"ended with status {run['status']}")
    if not wrong and not counts.get("passed"):
        wrong.append("none ran")
    return ", ".join([*(f"**{words}**" for words in wrong), *(f"{number} {kind}" for kind, number in counts.items())])


def send(path: Part) -> str:
    """`bench latency` is half of a round trip: one message's way. And how much of what the slower of its parts would do."""
    ours, parts = microseconds(path, "latency"), [microseconds(path, "latency", way) for way in (BUS, HOST)]
    if ours is None:
        return "not run"
    known = [part for part in parts if part is not None]
    return f"{figure(NBYTES / ours / 1e3)} GB/s, {f'{100 * max(known) / ours:.0f} %' if known == parts else '-'}"


def all_reduce(path: Part, staged: Part) -> str:
    ours = microseconds(path, "all_reduce")
    if ours is None:
        return "not run"
    others = [microseconds(path, "all_reduce", COPY), microseconds(staged, "all_reduce")]
    return ", ".join([f"{figure(ours / 1e3)} ms", *(f"{figure(ours / other)}x" if other else "-" for other in others)])


def microseconds(path: Part, what: str, way: str = OURS) -> float | None:
    found = path.get("bench", {}).get(what, {}).get(str(NBYTES), {}).get(way)
    return found if isinstance(found, float) else None


def figure(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


if __name__ == "__main__":
    main()
