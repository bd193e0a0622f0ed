"""One measured row: the time of each implementation in each round, and figures derived from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from operator import truediv
from typing import Any

from mpicoll.bench import formulas

# Ways
API = "mpicoll"  # mpicoll.all_reduce(tensor)
BACKEND = "torch backend"  # torch.distributed.all_reduce(tensor), backend "mpi"
GLOO = "Gloo"  # torch.distributed.all_reduce(tensor, group=...), backend "gloo"
NCCL = "NCCL"  # the same, backend "nccl"; tensors on a GPU
RAW = "MPI"  # mpi4py on NumPy memory, see operations.py
COPY = "copy"  # a memory copy by one rank: the floor, see formulas.py
COPIES = "copies"  # the same by all ranks at once
BUS = "bus"  # tensors on a GPU: a copy of equally many bytes to pinned host memory, by all ranks at once


@dataclass(frozen=True)
class Row:
    """Times are seconds per call of the slowest rank, one per round; all implementations run in the same rounds."""

    what: str
    nbytes: int
    size: int  # ranks
    times: Mapping[str, list[float]]  # by implementation ("way")
    dtype: str = ""
    op: str = ""
    missing: Mapping[str, str] | None = None  # implementations that were not measured, and why

    def seconds(self, way: str) -> float:
        """The median."""
        return float(statistics.median(self.times[way]))

    def ratio(self, way: str, to: str) -> float | None:
        """Median over the rounds of the ratio of two implementations; None if one was not measured."""
        if not {way, to} <= self.times.keys():
            return None
        return float(statistics.median(map(truediv, self.times[way], self.times[to])))

    def algorithm_bandwidth(self, way: str) -> float:
        """Bytes per second, as the NCCL tests define it."""
        return self.nbytes * formulas.repeats(self.what) / self.seconds(way)

    def bus_bandwidth(self, way: str) -> float:
        return self.algorithm_bandwidth(way) * formulas.bus_factor(self.what, self.size)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        ways = {}
        for way, times in self.times.items():
            ways[way] = {
                "us": self.seconds(way) * 1e6,
                "least_us": min(times) * 1e6,
                "most_us": max(times) * 1e6,
                "algorithm_GB_per_s": self.algorithm_bandwidth(way) / 1e9,
                "bus_GB_per_s": self.bus_bandwidth(way) / 1e9,
                "ratios": {other: self.ratio(way, other) for other in self.times if other != way},
                "rounds_us": [seconds * 1e6 for seconds in times],
            }
        facts: dict[str, Any] = {"what": self.what, "bytes": self.nbytes, "ranks": self.size, "dtype": self.dtype, "op": self.op}
        return {**facts, "ways": ways, "missing": dict(self.missing or {})}
