"""Does mpicoll meet its targets? Starts the jobs that measure them (some minutes), and prints a table.

    python -m benchmarks.targets --repeat 5 --json FILE        measures; FILE is for --read
    python -m benchmarks.targets --read FILE...                the table of several runs: median [least, most]

Runs with one MPI share a column. A target that is missed is in bold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import footprint, jobs
from benchmarks.session import Figure, added, difference, mpi_name, read_row, to, to_better
from mpicoll.bench import options
from mpicoll.bench.formulas import EMPTY, spell
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.row import API, BACKEND, COPY, GLOO, RAW, Row
from mpicoll.bench.table import times

KIB, MIB = 1 << 10, 1 << 20
EVER = 1 << 62  # bytes
F32, HALF, HALVES = ("float32",), ("bfloat16",), ("bfloat16", "float16")
SHORT = ("all_reduce", "broadcast", "latency", "barrier")
MOVED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
NAMES = {"latency": "send + recv", "exchange": "isend + irecv + wait"}
START_RANKS = 4
IMPORT = """
import time, torch, torch.distributed
began = time.perf_counter()
import mpicoll
mpicoll.init_process_group, mpicoll.all_reduce
print(time.perf_counter() - began)
"""
Facts = dict[str, Any]


def _us(way: str) -> Figure:
    return lambda row: row.seconds(way) * 1e6 if way in row.times else None


def _own_start(row: Row) -> float:
    return (difference(row, "init", "MPI") or 0.0) * 1e3


@dataclass(frozen=True)
class Target:
    """``figure`` of the worst row of these operations, sizes and dtypes is at most ``at_most``."""

    what: str
    against: str
    at_most: float
    unit: str  # "x", "us", "ms"
    figure: Figure
    operations: Sequence[str]
    sizes: tuple[int, int] = (8, 8)
    dtypes: Sequence[str] = F32
    ranks: int = 2

    def worst(self, rows: Iterable[Row]) -> tuple[float, str] | None:
        """The largest figure, and its row."""
        found = [(value, row) for row in rows if self._counts(row) and (value := self.figure(row)) is not None]
        if not found:
            return None
        value, row = max(found, key=lambda pair: pair[0])
        return value, f"{row.what} {row.dtype} {spell(row.nbytes)}" if row.nbytes else row.what

    def _counts(self, row: Row) -> bool:
        sized = not row.nbytes or (row.dtype in self.dtypes and self.sizes[0] <= row.nbytes <= self.sizes[1])
        return row.what in self.operations and row.size == self.ranks and sized

    def spell(self, value: float) -> str:
        return f"{times(value)}x" if self.unit == "x" else f"{value:.1f} {self.unit}"


def _name(what: str) -> str:
    return what if what in EMPTY else f"{NAMES.get(what, what)}, 8 B"


def _call(what: str, at_most: float, way: str = API, dtypes: Sequence[str] = F32) -> Target:
    words = [f"time of {_name(what)}", *(HALF if dtypes is HALF else ()), *(["torch"] if way == BACKEND else [])]
    return Target(", ".join(words), "-", at_most, "us", _us(way), (what,), dtypes=dtypes)


def _large(what: str, mib: int, against: str, at_most: float, way: str = API) -> Target:
    words = f"{NAMES.get(what, what)}, {mib} MiB{', torch' if way == BACKEND else ''}"
    return Target(words, against, at_most, "x", lambda row: row.ratio(way, against), (what,), (mib * MIB, mib * MIB))


_REDUCED = ("all_reduce",)
TARGETS = [
    *(Target(_name(what), RAW, 1.5, "x", to(RAW), (what,)) for what in SHORT),
    Target("the same, through torch.distributed; added", API, 12, "us", added, SHORT),
    Target("every collective, 8 B ... 64 KiB", GLOO, 0.1, "x", to(GLOO), tuple(COLLECTIVES), (8, 64 * KIB)),
    Target("all_reduce, 1 MiB ... 256 MiB", GLOO, 0.5, "x", to(GLOO), _REDUCED, (MIB, EVER)),
    Target("all_reduce, 16 MiB ... 256 MiB", RAW, 0.75, "x", to(RAW), _REDUCED, (16 * MIB, EVER)),
    Target("all_reduce of bfloat16, float16, 1 MiB and up", GLOO, 0.3, "x", to(GLOO), _REDUCED, (MIB, EVER), HALVES),
    Target("*_tensor, *_single, broadcast, 1 ... 64 MiB", "Gloo or MPI", 0.8, "x", to_better, MOVED, (MIB, 64 * MIB)),
    Target("all_reduce, 16 MiB and up", "memory copy", 1.3, "x", to(COPY), _REDUCED, (16 * MIB, EVER)),
    Target(
        "DDP step, 64 MiB of gradients", "DDP on Gloo", 0.6, "x", lambda row: row.ratio(BACKEND, GLOO),
        ("DDP MLP 64 MiB",), (0, EVER),
    ),
    Target("4 ranks, all_reduce, 8 B", GLOO, 0.2, "x", to(GLOO), _REDUCED, ranks=4),
    Target("import mpicoll, after torch", "-", 30, "ms", lambda row: row.seconds("import") * 1e3, ("start",), ranks=4),
    Target("4 ranks, init_process_group", GLOO, 1.0, "x", lambda row: row.ratio("init", "Gloo"), ("start",), ranks=4),
    Target("the same without MPI_Init", "-", 50, "ms", _own_start, ("start",), ranks=4),
    *(_call("all_reduce", *aim) for aim in ((4, API), (12, BACKEND))),
    _call("broadcast", 3.5),
    _call("barrier", 3.5),
    *(_call("latency", *aim) for aim in ((3.5, API), (10, BACKEND))),
    *(_call("exchange", 30, way) for way in (API, BACKEND)),
    _call("all_reduce", 8, dtypes=HALF),
    _call("reduce_scatter_tensor", 15, dtypes=HALF),
    _call("all_to_all", 8),
    *(_large("latency", mib, RAW, 1.05, way) for mib in (1, 16, 64) for way in (API, BACKEND)),
    _large("broadcast", 16, RAW, 1.0),
    _large("all_reduce", 64, COPY, 1.5),
    _large("all_gather_into_tensor", 64, COPY, 1.5),
    Target("4 ranks, all_reduce of bfloat16, 16 MiB", GLOO, 0.35, "x", to(GLOO), _REDUCED, (16 * MIB, 16 * MIB), HALF, 4),
]  # fmt: skip


def commands() -> Iterator[tuple[int, str]]:
    """Ranks and command of each job."""
    most = "--impl mpicoll gloo mpi4py"
    for what in (*COLLECTIVES, "latency"):
        sizes = "" if what in EMPTY else "--sizes 8 512 4KiB 64KiB"
        yield 2, f"mpicoll.bench {what} {sizes} {'' if what in SHORT else most}"
    yield 2, "mpicoll.bench exchange --sizes 8"
    yield 2, "mpicoll.bench latency --sizes 1MiB 16MiB 64MiB"
    for what in ("all_reduce", "reduce_scatter_tensor"):
        yield 2, f"mpicoll.bench {what} --sizes 8 --dtypes bfloat16 {most}"
    yield 2, f"mpicoll.bench all_reduce --sizes 1MiB 4MiB 16MiB 64MiB 256MiB --dtypes float32 bfloat16 float16 {most}"
    for what in MOVED:
        yield 2, f"mpicoll.bench {what} --sizes 1MiB 4MiB 16MiB 64MiB {most}"
    yield 2, "benchmarks.steps --rows mlp"
    yield 4, "mpicoll.bench all_reduce --sizes 8"
    yield 4, "mpicoll.bench all_reduce --sizes 16MiB --dtypes bfloat16"


def measure(repeat: int) -> Facts:
    """Runs the jobs. Raises jobs.ChildFailed."""
    rows: list[Row] = []
    machine: Facts = {}
    for ranks, command in commands():
        print(command, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figures.json"
            jobs.job(ranks, "-m", *command.split(), "--repeat", str(repeat), "--json", str(file))
            facts = json.loads(file.read_text())
        machine = machine or facts["machine"]
        rows += map(read_row, facts["rows"])
    return judged([*rows, start(repeat)], machine)


def start(repeat: int) -> Row:
    """The seconds of a start and of its parts. Raises jobs.ChildFailed."""
    parts: dict[str, list[float]] = {"import": [], "init": [], "Gloo": [], "MPI": []}
    for _ in range(repeat):
        # torch would import mpicoll as a device backend; without that the whole import is measured
        parts["import"].append(float(jobs.python("-c", IMPORT, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})))
        ours, gloo = ({use.stage: use.wall_s for use in footprint.job(START_RANKS, backend)} for backend in ("mpi", "gloo"))
        parts["init"].append(ours["start"] + ours["world"])
        parts["Gloo"].append(gloo["world"])
        parts["MPI"].append(ours["start"])
    return Row("start", 0, START_RANKS, parts)


def judged(rows: Sequence[Row], machine: Facts) -> Facts:
    """The figure of each target, for JSON."""
    found = []
    for target in TARGETS:
        value, note = target.worst(rows) or (None, "not measured")
        found.append({"what": target.what, "value": value, "worst": note})
    return {"machine": machine, "targets": found}


def table(runs: Sequence[Facts]) -> list[str]:
    """The lines of the table in Markdown. The worst rows are named if there is one run."""
    by_mpi: dict[str, list[Facts]] = {}
    for run in runs:
        by_mpi.setdefault(mpi_name(run["machine"]["mpi"]), []).append(run)
    lines = [["what", "against", "at most", *by_mpi, ""], ["---"] * (4 + len(by_mpi))]
    for i, target in enumerate(TARGETS):
        cells = [_cell(target, [run["targets"][i]["value"] for run in some]) for some in by_mpi.values()]
        worst = runs[0]["targets"][i]["worst"] if len(runs) == 1 else ""
        lines.append([target.what, target.against, target.spell(target.at_most), *cells, worst])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _cell(target: Target, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    median = statistics.median(known)
    middle = f"**{target.spell(median)}**" if median > target.at_most else target.spell(median)
    return middle if len(known) == 1 else f"{middle} [{target.spell(min(known))},{target.spell(max(known))}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=options.count, default=9, metavar="N", help="rounds of each job; default 9")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--read", nargs="+", metavar="FILE", help="measure nothing, and read what --json has written")
    args = parser.parse_args()
    runs = [json.loads(Path(file).read_text()) for file in args.read or ()] or [measure(args.repeat)]
    if args.json:
        Path(args.json).write_text(json.dumps(runs[0], indent=1) + "\n")
    print(*table(runs), sep="\n")


if __name__ == "__main__":
    main()
