"""What the figures hold for."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

import mpicoll
import mpicoll._cpus as cores_here
from mpicoll.bench.control import ControlChannel


@dataclass(frozen=True)
class Machine:
    """Host of rank 0."""

    cores: int  # that the job may use there
    cpu: str
    ranks: int
    local_ranks: int  # on that host
    mpi: str
    torch: str
    mpicoll: str
    python: str
    threads: int  # of torch, per rank

    @property
    def cores_per_rank(self) -> float:
        return self.cores / self.local_ranks

    @property
    def full(self) -> bool:
        """No rank has a spare core: what runs beside a rank's own work takes its time."""
        return self.cores_per_rank < 2

    def facts(self) -> dict[str, Any]:
        return {**asdict(self), "cores_per_rank": self.cores_per_rank, "full": self.full}

    def lines(self) -> list[str]:
        return [
            f"{self.ranks} ranks, {self.cores} cores ({self.cpu}); {self.mpi}",
            f"torch {self.torch}, mpicoll {self.mpicoll}, Python {self.python}; {self.threads} thread of torch's per rank",
        ]


def describe(control: ControlChannel) -> Machine:
    """(collective)"""
    mine = (platform.node(), tuple(sorted(cores_here.allowed())), cores_here.usable_cores())
    host = control.first(platform.node())
    there = [(mask, cores) for name, mask, cores in control.all(mine) if name == host]
    cores = sum(dict(there).values())  # ranks that are bound have masks of their own; others share one
    return Machine(
        cores, _cpu(), control.size, len(there), control.library, torch.__version__, mpicoll.__version__,
        platform.python_version(), torch.get_num_threads(),
    )  # fmt: skip


def _cpu() -> str:
    lines = cores_here.read("/proc/cpuinfo").split("\n")
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
