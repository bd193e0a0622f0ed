"""`bench startup`: the time of the import, of init_process_group and of the first collective, also of Gloo, in separate jobs.

    python -m mpicoll.run -n 4 -m mpicoll.bench.startup mpi FOLDER        such a job; each rank prints its times

mpicoll.run starts every job. A rank begins after all ranks have imported torch; each creates a file in FOLDER to say so.

# Note [Byte code]
# An installer compiles a package once. A source tree is compiled by the first program that imports it, and by every program if
# PYTHONDONTWRITEBYTECODE is set: that took 200 ms of CPU time of each rank, where loading byte code takes 33 ms. So the jobs may
# write byte code, and the first job, which does, is not measured.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicoll._discovery import detect
from mpicoll.bench import jobs
from mpicoll.bench.table import milli, spread

IMPORT = """
import time, torch, torch.distributed
began = time.perf_counter()
import mpicoll
mpicoll.init_process_group, mpicoll.all_reduce
print(time.perf_counter() - began)
"""
BACKENDS = {"mpi": "backend mpi", "gloo": "Gloo"}
COMPILE_ONCE = {"PYTHONDONTWRITEBYTECODE": ""}  # see Note [Byte code]


@dataclass(frozen=True)
class Startup:
    """Seconds, one per round."""

    imported: list[float]
    init: dict[str, list[float]]  # by backend, of the slowest rank
    first: dict[str, list[float]]
    mpi: list[float]  # the part of init["mpi"] until MPI has started
    compiled: bool = True  # see Note [Byte code]

    def import_s(self) -> float:
        """The median."""
        return statistics.median(self.imported)

    def own_s(self) -> float:
        """The median of init_process_group without the part until MPI has started."""
        return statistics.median(a - b for a, b in zip(self.init["mpi"], self.mpi, strict=True))

    def init_ratio(self) -> float:
        """Median over the rounds of the ratio to Gloo."""
        return statistics.median(a / b for a, b in zip(self.init["mpi"], self.init["gloo"], strict=True))

    def facts(self) -> dict[str, Any]:
        return {
            "import_s": self.imported, "init_s": self.init, "first_all_reduce_s": self.first, "mpi_init_s": self.mpi,
            "byte_code": self.compiled,
        }  # fmt: skip

    def lines(self, ranks: int) -> list[str]:
        lines = ["", f"start, milliseconds: median [least, most] of {len(self.imported)} rounds; {ranks} ranks, the slowest"]
        figures = {"import mpicoll, after torch": self.imported}
        for backend, name in BACKENDS.items():
            figures[f"init_process_group, {name}"] = self.init[backend]
            if backend == "mpi":
                figures["of which MPI_Init"] = self.mpi
            figures[f"first all_reduce, {name}"] = self.first[backend]
        lines += [f"{name:>30}{spread(seconds, milli):>28}" for name, seconds in figures.items()]
        if not self.compiled:
            lines.append("No byte code could be written beside mpicoll's files, so that every start compiled them.")
        return lines


def measure(ranks: int, rounds: int) -> Startup:
    """Starts the jobs; call it on one rank only. Raises jobs.ChildFailed."""
    _import_s()
    _reports(ranks, "mpi")
    compiled = Path(importlib.util.cache_from_source(detect.__file__)).exists()
    result = Startup([], {backend: [] for backend in BACKENDS}, {backend: [] for backend in BACKENDS}, [], compiled)
    for _ in range(rounds):
        result.imported.append(_import_s())
        for backend in BACKENDS:
            reports = _reports(ranks, backend)
            result.init[backend].append(max(each["init"] for each in reports))
            result.first[backend].append(max(each["first"] for each in reports))
            if backend == "mpi":
                result.mpi.append(max(each["mpi"] for each in reports))
    return result


def _import_s() -> float:
    # torch would import mpicoll as a device backend; without that the whole import is measured
    return float(jobs.python("-c", IMPORT, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **COMPILE_ONCE}))


def _reports(ranks: int, backend: str) -> list[dict[str, float]]:
    """The times of each rank of a job."""
    with tempfile.TemporaryDirectory() as folder:
        lines = jobs.job(ranks, "-m", "mpicoll.bench.startup", backend, folder, env=COMPILE_ONCE).split("\n")
    reports = [json.loads(line) for line in lines if line.startswith("{")]
    if len(reports) != ranks:
        raise jobs.ChildFailed(f"{len(reports)} of {ranks} ranks answered")
    return reports


def main(backend: str, folder: str) -> None:
    import torch
    import torch.distributed

    launch = detect.detect()
    assert launch is not None
    torch.set_num_threads(1)
    x = torch.ones(2)
    (Path(folder) / str(launch.rank)).touch()
    while len(list(Path(folder).iterdir())) < launch.size:
        time.sleep(0.002)
    began = time.perf_counter()
    if backend == "mpi":
        importlib.import_module("mpicoll._mpi.library")  # which starts MPI, as init_process_group would
    started = time.perf_counter()
    torch.distributed.init_process_group(backend)
    initialised = time.perf_counter()
    torch.distributed.all_reduce(x)
    done = time.perf_counter()
    assert torch.equal(x, torch.full((2,), float(launch.size)))
    print(
        json.dumps({"mpi": started - began, "init": initialised - began, "first": done - initialised}) + "\n", end="", flush=True
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
