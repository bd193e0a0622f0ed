"""The output of a run, on rank 0: lines when they are ready, JSON at the end. And rows as text: spread, ratios, bandwidths."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import mpicoll
import mpicoll._base.cpus as cores_here
from mpicoll.bench.formulas import spell
from mpicoll.bench.rounds import ControlChannel
from mpicoll.bench.row import API, BACKEND, COPY, GLOO, NCCL, RAW, Row

LEGEND = (
    "microseconds per call of the slowest rank: median [least, most] of the rounds; x: time of mpicoll / time of the other,",
    "median of the rounds; floor: a memory copy by one rank; bus: bus bandwidth of mpicoll as the NCCL tests define it, GB/s",
)
CELL = 26
RATIOS = {"x MPI": RAW, "x Gloo": GLOO, "x NCCL": NCCL, "x floor": COPY}


@dataclass(frozen=True)
class Machine:
    """The job, and the host of rank 0, to which the figures belong; and the versions."""

    cores: int  # of that host that the job may use
    cpu: str
    ranks: int
    local_ranks: int  # on that host
    mpi: str
    torch: str
    mpicoll: str
    python: str
    threads: int  # of torch, per rank

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "cores_per_rank": self.cores / self.local_ranks}

    def lines(self) -> list[str]:
        threads = f"{self.threads} torch thread{'s' * (self.threads > 1)} per rank"
        return [
            f"{self.ranks} ranks, {self.cores} cores ({self.cpu}); {self.mpi}",
            f"torch {self.torch}, mpicoll {self.mpicoll}, Python {self.python}; {threads}",
        ]


def describe(control: ControlChannel) -> Machine:
    """Describes the machine (collective)."""
    own = (platform.node(), tuple(sorted(cores_here.allowed())), cores_here.usable_cores())
    host = control.first(platform.node())
    on_host = [(mask, cores) for name, mask, cores in control.all(own) if name == host]
    cores = sum(dict(on_host).values())  # bound ranks have different masks; others share one
    return Machine(
        cores, _cpu(), control.size, len(on_host), control.library, torch.__version__, mpicoll.__version__,
        platform.python_version(), torch.get_num_threads(),
    )  # fmt: skip


def _cpu() -> str:
    lines = cores_here.read("/proc/cpuinfo").split("\n")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


class Output:
    """Collects and prints rows on rank 0; does nothing on other ranks."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self.active = rank == 0
        self.rows: list[Row] = []
        self.extra: dict[str, Any] = {}  # further entries of the JSON file

    def say(self, *lines: str) -> None:
        for line in lines if self.active else ():
            print(line, flush=True)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row

    def facts(self) -> dict[str, Any]:
        return {"machine": self.machine.facts(), "rows": [row.facts() for row in self.rows], **self.extra}

    def write(self, json_file: str | None) -> None:
        if self.active and json_file is not None:
            Path(json_file).write_text(json.dumps(self.facts(), indent=1) + "\n")


class Table:
    """Lines for one collective, dtype and op; a column for each selected implementation."""

    def __init__(self, title: str, ways: Sequence[str]) -> None:
        self.title = title
        self.ways = [way for way in (API, BACKEND, GLOO, NCCL, RAW) if way in ways]
        self.ratios = [name for name, way in RATIOS.items() if API in ways and way in (*ways, COPY)]

    def head(self) -> list[str]:
        cells = "".join(f"{way:>{CELL}}" for way in self.ways)
        ratios = "".join(f"{name:>8}" for name in self.ratios)
        return ["", self.title, f"{'bytes':>9}{cells}{ratios}{'bus':>8}"]

    def line(self, row: Row) -> str:
        cells = "".join(f"{_time(row, way):>{CELL}}" for way in self.ways)
        ratios = "".join(f"{times(row.ratio(API, RATIOS[name])):>8}" for name in self.ratios)
        bus = f"{row.bus_bandwidth(API) / 1e9:.2f}" if row.nbytes and API in row.times else "-"
        return f"{spell(row.nbytes) if row.nbytes else '-':>9}{cells}{ratios}{bus:>8}"


def times(ratio: float | None) -> str:
    """0.1234 -> "0.12"."""
    if ratio is None:
        return "-"
    return f"{ratio:.3f}" if ratio < 0.1 else f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def _time(row: Row, way: str) -> str:
    return spread(row.times[way], micro) if way in row.times else "-"


def spread(seconds: Sequence[float], spell: Callable[[float], str]) -> str:
    """The median, and in brackets the least and the most."""
    return f"{spell(statistics.median(seconds))} [{spell(min(seconds))},{spell(max(seconds))}]"


def micro(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"
