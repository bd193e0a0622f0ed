"""How long does a start take, and what does a rank cost? Time, open files, threads, shared memory; jobs of 2, 4, 8 ... ranks.

    python -m benchmarks.footprint 2 4 8 16 32
    mpiexec -n 8 python -m benchmarks.footprint mpi FOLDER        such a job; each rank prints what it has used after each stage
    mpiexec -n 8 python -m benchmarks.footprint raw FOLDER        the same communication by mpi4py alone, without torch

    stage             mpi                                     gloo              raw
    start             import of mpicoll, and MPI_Init         MPI_Init          MPI_Init
    world             init_process_group                      likewise          the communicators that a world has
    small, large      all_reduce of 8 bytes, of 4 MiB         likewise          Allreduce
    all_to_all        of 64 KiB for each rank                 likewise          Alltoall
    messages          send and recv with every other rank     likewise          Sendrecv
    rpc               init_rpc                                -                 -

The first stage begins when all ranks have imported torch; each creates a file in FOLDER to say so.

What a job uses in all grows with the number of ranks. What one rank uses must not, or the job grows with its square.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import jobs
from mpicoll._base import launcher
from mpicoll._base.cpus import read

STAGES = ("start", "world", "small", "large", "all_to_all", "messages", "rpc")
PROGRAMS = ("mpi", "gloo", "raw")
LARGE, BLOCK, MESSAGE = 4 << 20, 64 << 10, 1 << 10  # bytes: of an all_reduce, of a block of all_to_all, of a message

Stage = tuple[str, Callable[[], Any]]


@dataclass(frozen=True)
class Use:
    """What the ranks of one job have used up to the end of a stage."""

    ranks: int
    program: str
    stage: str
    wall_s: float  # of this stage, the slowest rank
    cpu_s: float  # of this stage, mean over the ranks
    first_files: int  # open files of rank 0, whose store the other ranks are connected to
    files: int  # of another rank, the most
    threads: int  # of a rank, the most
    shared: int  # bytes of shared memory that all ranks together have touched

    def line(self) -> str:
        times = f"{self.wall_s * 1e3:>10.0f}{self.cpu_s * 1e3:>10.1f}"
        counts = f"{self.first_files:>8}{self.files:>7}{self.threads:>9}"
        shared = f"{self.shared / self.ranks / 2**20:>13.2f}{self.shared / 2**20:>12.1f}"
        return f"{self.ranks:>6}{self.program:>5}{self.stage:>12}{times}{counts}{shared}"


HEAD = (
    f"{'ranks':>6}{'':>5}{'stage':>12}{'wall ms':>10}{'CPU ms':>10}{'files of':>15}{'threads':>9}{'shared MiB':>13}{'':>12}",
    f"{'':>6}{'':>5}{'':>12}{'':>10}{'per rank':>10}{'rank 0':>8}{'others':>7}{'':>9}{'per rank':>13}{'of the job':>12}",
)


def measure(sizes: Sequence[int]) -> None:
    """Runs the jobs, and prints a line for each stage as soon as it is known. Raises jobs.ChildFailed."""
    print(*HEAD, sep="\n")
    for ranks in sizes:
        for program in PROGRAMS:
            for use in job(ranks, program):
                print(use.line(), flush=True)


def job(ranks: int, program: str) -> list[Use]:
    """What the ranks of a job use, by stage. Raises jobs.ChildFailed."""
    with tempfile.TemporaryDirectory() as folder:
        return summary(ranks, program, jobs.job(ranks, "-m", "benchmarks.footprint", program, folder))


def summary(ranks: int, program: str, output: str) -> list[Use]:
    """What the lines of the ranks say together. Raises jobs.ChildFailed if a rank is missing."""
    reports = [json.loads(line) for line in output.split("\n") if line.startswith("{")]
    uses = []
    for stage in STAGES[: None if program == "mpi" else -1]:
        own = [each for each in reports if each["stage"] == stage]
        if len(own) != ranks:
            raise jobs.ChildFailed(f"{program}, {stage}: {len(own)} of {ranks} ranks answered")
        wall, cpu = max(each["wall"] for each in own), sum(each["cpu"] for each in own) / ranks
        files = {each["rank"]: each["files"] for each in own}
        first, threads = files.pop(0), max(each["threads"] for each in own)
        shared = sum(each["shared"] for each in own)
        uses.append(Use(ranks, program, stage, wall, cpu, first, max(files.values(), default=first), threads, shared))
    return uses


# --- in a rank --------------------------------------------------------------------------------------------------------


def used() -> dict[str, int]:
    """Open files, threads, and this rank's part of the shared memory: a page that n ranks have mapped counts 1/n."""
    rollup = {line.split(":")[0]: line.split() for line in read("/proc/self/smaps_rollup").splitlines()[1:]}
    shared = int(rollup["Pss_Shmem"][1]) << 10 if "Pss_Shmem" in rollup else 0
    return {"files": len(os.listdir("/proc/self/fd")) - 1, "threads": len(os.listdir("/proc/self/task")), "shared": shared}


def rank(program: str, folder: str) -> None:
    launch = launcher.detect()
    assert launch is not None
    stages, close = _raw(launch.rank, launch.size) if program == "raw" else _torch(program, launch.rank, launch.size)
    (Path(folder) / str(launch.rank)).touch()
    while len(list(Path(folder).iterdir())) < launch.size:
        time.sleep(0.002)
    for name, run in stages:
        began, cpu = time.perf_counter(), time.process_time()
        run()
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        _barrier()
        line = json.dumps({"stage": name, "rank": launch.rank, "wall": wall, "cpu": cpu, **used()}) + "\n"
        _barrier()  # the next stage touches no memory before all ranks have looked
        print(line, end="", flush=True)
    close()


def _barrier() -> None:
    from mpicoll._mpi.library import MPI

    MPI.COMM_WORLD.Barrier()


def _torch(backend: str, rank: int, size: int) -> tuple[list[Stage], Callable[[], Any]]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)

    def messages() -> None:
        received = torch.empty(MESSAGE, dtype=torch.uint8)
        sent = torch.empty(MESSAGE, dtype=torch.uint8)
        for step in range(1, size):
            request = dist.isend(sent, (rank + step) % size)
            dist.recv(received, (rank - step) % size)
            assert request is not None
            request.wait()

    def all_to_all() -> None:
        dist.all_to_all_single(torch.empty(BLOCK * size, dtype=torch.uint8), torch.ones(BLOCK * size, dtype=torch.uint8))

    def init_rpc() -> None:
        importlib.import_module("mpicoll.rpc").init_rpc(f"worker{rank}", rank=rank, world_size=size)

    stages: list[Stage] = [
        ("start", lambda: importlib.import_module("mpicoll._c10d.init" if backend == "mpi" else "mpicoll._mpi.library")),
        ("world", lambda: dist.init_process_group(backend)),
        ("small", lambda: dist.all_reduce(torch.ones(2))),
        ("large", lambda: dist.all_reduce(torch.ones(LARGE // 4))),
        ("all_to_all", all_to_all),
        ("messages", messages),
        ("rpc", init_rpc),
    ]

    def close() -> None:
        if backend == "mpi":
            importlib.import_module("mpicoll.rpc").shutdown()
        dist.destroy_process_group()

    return stages if backend == "mpi" else stages[:-1], close


def _raw(rank: int, size: int) -> tuple[list[Stage], Callable[[], Any]]:
    import numpy as np

    comms: list[Any] = []

    def world() -> None:
        from mpicoll._mpi.library import MPI

        comms.append(MPI.COMM_WORLD.Dup())
        comms.append(comms[0].Dup())
        comms[0].Split_type(MPI.COMM_TYPE_SHARED).Free()

    def all_reduce(nbytes: int) -> None:
        comms[1].Allreduce(np.ones(nbytes // 4, dtype=np.float32), np.empty(nbytes // 4, dtype=np.float32))

    def all_to_all() -> None:
        comms[1].Alltoall(np.ones(BLOCK * size, dtype=np.uint8), np.empty(BLOCK * size, dtype=np.uint8))

    def messages() -> None:
        sent, received = np.ones(MESSAGE, dtype=np.uint8), np.empty(MESSAGE, dtype=np.uint8)
        for step in range(1, size):
            comms[1].Sendrecv(sent, (rank + step) % size, recvbuf=received, source=(rank - step) % size)

    stages: list[Stage] = [
        ("start", lambda: importlib.import_module("mpicoll._mpi.library")),  # which starts MPI, and is little more than mpi4py
        ("world", world),
        ("small", lambda: all_reduce(8)),
        ("large", lambda: all_reduce(LARGE)),
        ("all_to_all", all_to_all),
        ("messages", messages),
    ]
    return stages, lambda: None


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in PROGRAMS:
        rank(*sys.argv[1:])
    else:
        measure([int(word) for word in sys.argv[1:]] or [2, 4, 8, 16, 32])
