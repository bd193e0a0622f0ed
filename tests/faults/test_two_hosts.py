"""A job on two hosts of network namespaces: a rank, a daemon or the cable is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, clean_environment, hosts

REASON = hosts.missing()
pytestmark = [
    pytest.mark.launch,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

WAITS = str(ROOT / "tests" / "faults" / "scripts" / "waits.py")
JOB = """
import os, pathlib, sys, time
from mpi4py import MPI
comm, folder = MPI.COMM_WORLD, pathlib.Path(sys.argv[1])
comm.Barrier()
(folder / f".rank-{comm.rank}").write_text(f"{os.getpid()} {os.getppid()}")
(folder / f".rank-{comm.rank}").rename(folder / f"rank-{comm.rank}")
while True:
    comm.allreduce(1)
    time.sleep(0.01)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[hosts.Hosts]:
    with hosts.hosts(2, tmp_path) as up:
        yield up


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("fault", "cause"),
    [("rank", "killed by SIGKILL"), ("daemon", ""), ("cable", "")],
)
def test_the_job_ends(fault: str, cause: str, machines: hosts.Hosts, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = machines.command("--quiet", "--grace", "2", "--hostfile", str(machines.hostfile(1)), "-n", "2")
    job = subprocess.Popen(
        [*command, str(tmp_path / "job.py"), str(tmp_path)], env=clean_environment(**machines.environment()), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace",
    )  # fmt: skip
    try:
        end = time.monotonic() + 60
        while len(ranks := sorted(tmp_path.glob("rank-*"))) < 2:
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < end, "no ranks in time"
            time.sleep(0.05)
        pids = [[int(word) for word in path.read_text().split()] for path in ranks]
        begin = time.monotonic()
        if fault == "cable":
            machines.cut(1)
        else:
            os.kill(pids[1][0] if fault == "rank" else parent(pids[1][1]), signal.SIGKILL)
        _, errors = job.communicate(timeout=40)
        assert time.monotonic() - begin < 20
        assert job.returncode != 0, errors
        last = errors.replace("\0", "").strip().splitlines()[-1]
        assert last.startswith("mpicoll.run: "), errors
        if cause:
            assert last == f"mpicoll.run: rank 1 of 2 on mpihost2: {cause}", errors
        while any(Path(f"/proc/{pid}").exists() for pids_of_rank in pids for pid in pids_of_rank):
            assert time.monotonic() - begin < 25, "processes are left"
            time.sleep(0.05)
    finally:
        if job.poll() is None:
            job.kill()
            job.communicate(timeout=10)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (
            "misses an all_reduce",
            r"has waited for [345] s. Rank 1 has not come: its last collective .* 100, .*; its process \d+ on mpihost2 runs",
        ),
        # It stops itself after 2 s, so that it may still have answered when rank 0 says for the first time that it waits.
        (
            "stops",
            r"no end after [89].\d s. Rank 1 has not come: it has not answered for \d s: it is stopped, its host or network",
        ),
    ],
)
def test_a_rank_on_the_other_host_is_named(how: str, expected: str, machines: hosts.Hosts) -> None:
    done = machines.launch("--hostfile", str(machines.hostfile(1)), "-n", "2", WAITS, how, "8", timeout_s=60)
    assert done.returncode != 0
    assert re.search(f"all_reduce .*{expected}", done.stderr), done.stderr
