"""The table of (fault, door, number of ranks, hosts): in each case the job ends in time, names the culprit, and leaves nothing.

python -m pytest -m launch --runslow tests/faults      all of it, with the MPI of this environment
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.clock import clock
from tests.launch import jobs
from tests.support import ROOT, clean_environment, hosts, is_open_mpi

__all__ = ["clock"]

SCRIPT, WAITS = (str(ROOT / "tests" / "faults" / "scripts" / name) for name in ("failing.py", "waits.py"))
LIMIT_S, GONE_S = 4.0, 15.0
QUICK = {(2, "mpicoll", "killed"), (2, "torch", "stopped"), (2, "mpicoll", "leaves")}
ENDS = {  # what the last rank does, the exit status, and the cause in the last line
    "killed": jobs.FAULTS["is killed"],
    "os._exit(0)": jobs.FAULTS["leaves by os._exit(0)"],
    "sys.exit(3)": jobs.FAULTS["exits by a number"],
    "exception": jobs.FAULTS["raises"],
}
ABSENT = {  # what it does, and what the others say
    "stopped": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        r"Rank {} has not come: (its process \d+ is stopped \(SIGSTOP\)|it has not answered for \d+ s: it is stopped)",
    ),
    "late": ("time.sleep(60)", r"Rank {} has not come: .*; its process \d+ (on \S+ )?runs"),
    "leaves": ("sys.exit(0)", r"[Rr]ank {}[ ,].*program has ended"),
}
FAULTS = {**ENDS, **ABSENT}

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]


def start(
    command: list[str], ranks: int, door: str, fault: str, folder: Path, limit_s: float = LIMIT_S, **environ: str
) -> jobs.Job:
    """Starts failing.py by this command of mpicoll.run."""
    words = ["-n", str(ranks), SCRIPT, door, FAULTS[fault][0] if fault in FAULTS else "pass", str(folder), str(limit_s)]
    process = subprocess.Popen(
        [*command, *words], env=clean_environment(**{"OMP_NUM_THREADS": "1", **environ}), text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    return jobs.Job(process, folder, ranks=ranks)


def end(job: jobs.Job, within_s: float, began: float | None = None) -> tuple[int, str, str]:
    """How the job ended. In time, counted from the fault on, no process and no memory of it is left, and no sum was wrong."""
    job.wait_for("pids")
    ended = job.end()
    job.nothing_is_left(within_s)
    took_s = time.time() - (began or float(job.words("fault")[0]))
    assert took_s < within_s, f"{took_s:.1f} s\n{ended[2]}"
    assert sorted(job.folder.glob("wrong-*")) == []
    return ended


def check(fault: str, culprit: int, ranks: int, host: str, ended: tuple[int, str, str]) -> None:
    """The status is not 0, and the culprit is named."""
    returned, last, errors = ended
    assert returned != 0, errors
    if fault in ENDS:
        _, status, cause = ENDS[fault]
        assert returned == status, errors
        assert last.startswith(f"mpicoll.run: rank {culprit} of {ranks} on {host}: {cause}"), errors
    else:
        assert re.search(ABSENT[fault][1].format(culprit), errors), errors


CASES = [
    pytest.param(ranks, door, fault, marks=[] if (ranks, door, fault) in QUICK else pytest.mark.slow)
    for ranks in (2, 4)
    for door in ("mpicoll", "torch")
    for fault in FAULTS
]


@pytest.mark.parametrize(("ranks", "door", "fault"), CASES)
def test_on_one_host(ranks: int, door: str, fault: str, tmp_path: Path, clock: dict[str, str]) -> None:
    limit_s = LIMIT_S / 2 if clock else LIMIT_S
    job = start([sys.executable, "-m", "mpicoll.run", "--quiet"], ranks, door, fault, tmp_path, limit_s, **clock)
    ended = end(job, limit_s + 5 if fault in ("stopped", "late") else GONE_S)
    check(fault, ranks - 1, ranks, socket.gethostname(), ended)


REASON = hosts.missing()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[hosts.Hosts]:
    with hosts.hosts(2, tmp_path) as up:
        yield up


def on_hosts(machines: hosts.Hosts, ranks: int, door: str, fault: str, folder: Path) -> jobs.Job:
    command = machines.command("--quiet", "--hostfile", str(machines.hostfile(ranks // 2)))
    return start(command, ranks, door, fault, folder, **machines.environment())


def nothing_in_shared_memory(machines: hosts.Hosts, launcher_lost: bool = False) -> None:
    """Hydra kills ranks and monitors at once: where mpicoll.run does not live, nobody is left to remove what MPICH has made."""
    first, second = (os.listdir(Path(f"/proc/{pid}/root", "dev", "shm")) for pid in machines.pids)
    known = () if is_open_mpi() else ("mpich_shm_",)
    assert [name for name in first if not (launcher_lost and name.startswith(known))] == []
    assert [name for name in second if not name.startswith(known)] == []


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize(("ranks", "door"), [(2, "mpicoll"), (4, "torch")])
@pytest.mark.parametrize("fault", FAULTS)
def test_on_two_hosts(fault: str, ranks: int, door: str, machines: hosts.Hosts, tmp_path: Path) -> None:
    job = on_hosts(machines, ranks, door, fault, tmp_path)
    check(fault, ranks - 1, ranks, machines.names[1], end(job, GONE_S))
    nothing_in_shared_memory(machines)


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize(("ranks", "door"), [(2, "mpicoll"), (4, "torch")])
@pytest.mark.parametrize("fault", ["cable", "daemon", "launcher"])
def test_what_connects_two_hosts_is_lost(fault: str, ranks: int, door: str, machines: hosts.Hosts, tmp_path: Path) -> None:
    job = on_hosts(machines, ranks, door, "none", tmp_path)
    job.wait_for("pids")
    time.sleep(0.5)
    began = time.time()
    if fault == "cable":
        machines.cut(1)
    elif fault == "daemon":
        monitor = int((tmp_path / f"pids-{ranks - 1}").read_text().split()[1])
        os.kill(parent(monitor), signal.SIGKILL)
    else:
        job.process.kill()
    returned, last, errors = end(job, 20 if fault == "cable" else GONE_S, began)
    assert returned != 0, errors
    assert fault == "launcher" or last.startswith("mpicoll.run: "), errors
    nothing_in_shared_memory(machines, launcher_lost=fault == "launcher")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# A rank that stops itself does so after two looks, so that it may still have answered when rank 0 says first that it waits.
ELSEWHERE = {
    "misses an all_reduce": r"has waited for [345] s. Rank 1 has not come: its last .* 100, .*; its process \d+ on mpihost2 runs",
    "stops": r"no end after [89].\d s. Rank 1 has not come: it has not answered for \d s: it is stopped, its host or network",
}


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize("how", ELSEWHERE)
def test_a_rank_on_the_other_host_is_named(how: str, machines: hosts.Hosts) -> None:
    done = machines.launch("--hostfile", str(machines.hostfile(1)), "-n", "2", WAITS, how, "8", timeout_s=60)
    assert done.returncode != 0
    assert re.search(f"all_reduce .*{ELSEWHERE[how]}", done.stderr), done.stderr
