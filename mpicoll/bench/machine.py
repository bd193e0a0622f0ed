"""The machine and the versions that the figures belong to."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

import mpicoll
import mpicoll._base.cpus as cores_here
from mpicoll.bench.rounds import ControlChannel


@dataclass(frozen=True)
class Machine:
    """The job, and the host of rank 0."""

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
