"""One measured row: every way's time in every round, and what follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpicoll.bench import formulas

# Ways
API = "mpicoll"  # mpicoll.all_reduce(tensor)
BACKEND = "torch backend"  # torch.distributed.all_reduce(tensor), backend "mpi"
GLOO = "Gloo"  # torch.distributed.all_reduce(tensor, group=...), backend "gloo"
NCCL = "NCCL"  # the same, backend "nccl"; of a GPU's tensors
RAW = "MPI"  # mpi4py on NumPy memory, see bench/raw_mpi.py
FLOAT32 = "float32"  # the mpicoll API with as many bytes of float32, beside dtypes of two bytes
COPY = "copy"  # one rank's memory copy, the floor, see formulas.py
COPIES = "copies"  # the same by all ranks at once
BUS = "bus"  # of a GPU's tensors: a copy of as many bytes to pinned host memory, by all ranks at once


@dataclass(frozen=True)
class Row:
    """Times are seconds per call, of the slowest rank, a figure per round; all ways in the same rounds."""

    what: str
    nbytes: int
    size: int  # ranks
    times: Mapping[str, list[float]]  # by way
    dtype: str = ""
    op: str = ""
    missing: Mapping[str, str] | None = None  # ways that this row does not have, and why

    def seconds(self, way: str) -> float:
        """The median."""
        return float(statistics.median(self.times[way]))

    def spread(self, way: str) -> tuple[float, float]:
        """Least and most."""
        return min(self.times[way]), max(self.times[way])

    def ratio(self, way: str, to: str) -> float | None:
        """The median of the rounds' ratios; None where one of both was not measured."""
        if way not in self.times or to not in self.times:
            return None
        return statistics.median(a / b for a, b in zip(self.times[way], self.times[to], strict=True))

    def best_ratio(self, way: str, others: tuple[str, ...]) -> float | None:
        """To the better of the others."""
        return max((found for other in others if (found := self.ratio(way, other)) is not None), default=None)

    def ratio_to_sum(self, way: str, others: tuple[str, ...]) -> float:
        """The median of the rounds' ratios to the others' times together."""
        together: list[float] = [sum(parts) for parts in zip(*(self.times[other] for other in others), strict=True)]
        return statistics.median(a / b for a, b in zip(self.times[way], together, strict=True))

    def difference(self, way: str, to: str) -> float | None:
        """Seconds: the median of the rounds' differences."""
        if way not in self.times or to not in self.times:
            return None
        return statistics.median(a - b for a, b in zip(self.times[way], self.times[to], strict=True))

    def algorithm_bandwidth(self, way: str) -> float:
        """Bytes per second, as the NCCL tests define it."""
        return formulas.moved(self.what, self.nbytes) / self.seconds(way)

    def bus_bandwidth(self, way: str) -> float:
        return self.algorithm_bandwidth(way) * formulas.bus_factor(self.what, self.size)

    @property
    def copied(self) -> float | None:
        """Bytes per second of the memory copy."""
        nbytes = formulas.floor_bytes(self.what, self.nbytes, self.size) * formulas.repeats(self.what)
        return nbytes / self.seconds(COPY) if COPY in self.times else None

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        ways = {}
        for way, times in self.times.items():
            least, most = self.spread(way)
            ways[way] = {
                "us": self.seconds(way) * 1e6,
                "least_us": least * 1e6,
                "most_us": most * 1e6,
                "algorithm_GB_per_s": self.algorithm_bandwidth(way) / 1e9,
                "bus_GB_per_s": self.bus_bandwidth(way) / 1e9,
                "ratios": {other: self.ratio(way, other) for other in self.times if other != way},
                "rounds_us": [seconds * 1e6 for seconds in times],
            }
        found: dict[str, Any] = {"what": self.what, "bytes": self.nbytes, "ranks": self.size, "dtype": self.dtype, "op": self.op}
        return {**found, "ways": ways, "missing": dict(self.missing or {})}
