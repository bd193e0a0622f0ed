"""Jobs that tests start by ``mpicoll.run``: on the MPI that is installed, or on a made-up mpiexec of either family."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from mpicoll._base.cpus import longer
from tests.support import clean_environment

FAKE = Path(__file__).with_name("fake_mpiexec.py")
REAL = "mpiexec"
FAKES = ("openmpi", "mpich")
ON_REQUEST = pytest.param(REAL, marks=pytest.mark.slow)
BY_FAKES = pytest.mark.parametrize("by", FAKES)
BY_ANY = pytest.mark.parametrize("by", [*FAKES, ON_REQUEST])
BY_ALL = pytest.mark.parametrize("by", [*FAKES, REAL])

# `mpicoll.run` on a made-up mpiexec. It waits shorter, and leaves a file for each monitor that has said that it is there.
ON_FAKE = """
import pathlib, sys
from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch import run, supervisor

def take(reports, connection, line, take=supervisor.Reports._take):
    known = take(reports, connection, line)
    if b'"number"' in line:  # the first one
        pathlib.Path(f"monitor-{connection.rank.number}").touch()
    return known

supervisor.Reports._take = take
by, path, *words = sys.argv[1:]
vendor, version = {"openmpi": ("Open MPI", (5, 0, 11)), "mpich": ("MPICH", (5, 0, 2))}[by]
run.find_mpi, run.find_mpiexec = lambda *_: Mpi(vendor, version, None), lambda *_: Mpiexec(path, by, version)
supervisor.SETTLE_S = supervisor.KILL_S = supervisor.LAST_REPORTS_S = 0.5
supervisor.LEFT_BEHIND_S = run.FIRST_PAUSE_S = run.OTHER_RANKS_S = 0.5
sys.exit(run.main(words))
"""


def command(folder: Path, by: str, *words: str, variant: str = "usual") -> list[str]:
    """``mpicoll.run words...``. by: ``REAL``, or the family of a made-up mpiexec. variant: see fake_mpiexec.py."""
    if by == REAL:
        return [sys.executable, "-m", "mpicoll.run", *words]
    mpiexec = folder / "mpiexec"
    if not mpiexec.exists():
        mpiexec.write_text(f"#!/bin/sh\nexec {sys.executable} -IS {FAKE} {by} '{variant}' \"$@\"\n")
        mpiexec.chmod(0o755)
    return [sys.executable, "-c", ON_FAKE, by, str(mpiexec), *words]


def run(
    folder: Path, *words: str, by: str = REAL, timeout_s: float = 50, variant: str = "usual", **environ: str
) -> subprocess.CompletedProcess[str]:
    """``mpicoll.run words...`` in ``folder``, ended after timeout_s (longer on a busy machine)."""
    here = clean_environment()
    here.pop("OMP_NUM_THREADS", None)  # CI sets it, and mpicoll.run has something to say where nobody does
    return subprocess.run(
        command(folder, by, *words, variant=variant), cwd=folder, env={**here, **environ}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, errors="replace", timeout=longer(timeout_s),
    )  # fmt: skip


def script(folder: Path, text: str, name: str = "job.py") -> str:
    """Writes a program, which knows its ``rank`` and the ``size`` of the job; returns its name."""
    (folder / name).write_text(f"{HEAD}\n{text}\n")
    return name


HEAD = """
import os, signal, sys, time
rank, size = (int(os.environ.get(f"OMPI_COMM_WORLD_{name}") or os.environ[f"PMI_{name}"]) for name in ("RANK", "SIZE"))
"""

# Rank 1 executes the fault at its place; "all:" before a fault: every rank does. Without MPI, rank 0 waits for the end.
FAULTY = """
import pathlib
folder, when, fault = pathlib.Path(sys.argv[1]), *sys.argv[2:4]

def note(name, words=()):
    (folder / f".{name}").write_text(" ".join(map(str, words)))
    (folder / f".{name}").rename(folder / name)

def ancestors(pid):  # up to the process that has the environment of the test, which is mpicoll.run
    while pid > 1 and pid != int(os.environ["TEST_RUN_PARENT"]):
        yield pid
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def here(place):
    if place == when and (rank == 1 or fault.startswith("all:")):
        exec(fault.removeprefix("all:"), globals())

note(f"pids-{rank}", ancestors(os.getpid()))
if when == "without MPI":
    note(f"ready-{rank}")
    while len(list(folder.glob("ready-*"))) < size:
        time.sleep(0.01)
    here("without MPI")
    time.sleep(60 if rank == 0 and fault != "pass" and not fault.startswith("all:") else 0)
    sys.exit()
here("before MPI")
from mpi4py import MPI
note(f"memory-{rank}", {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/" in line and "(deleted)" not in line})
MPI.COMM_WORLD.Barrier()
note(f"ready-{rank}")
here("in MPI")
if when == "after MPI":
    MPI.Finalize()
    here("after MPI")
elif when in ("in mpicoll", "after destroy"):
    import mpicoll
    mpicoll.init_process_group()
    here("in mpicoll")
    if when == "after destroy":
        mpicoll.destroy_process_group()
        here("after destroy")
    else:
        mpicoll.barrier()
else:
    MPI.COMM_WORLD.Barrier()
"""

GONE_S = 15  # from the fault on, nothing of the job may run any more

KILL, SEGV = "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGSEGV)"
EARLY = "exit status 0 before the end of its program, by os._exit"
# What rank 1 does, the exit status of the job, and the cause in the last line.
FAULTS = {
    "is killed": (KILL, 137, "killed by SIGKILL"),
    "crashes": (SEGV, 139, "killed by SIGSEGV"),
    "leaves by os._exit(0)": ("os._exit(0)", 1, f"{EARLY}, without MPI_Finalize"),
    "leaves by os._exit(5)": ("os._exit(5)", 5, "exit status 5"),
    "exits by a number": ("sys.exit(3)", 3, "exit status 3"),
    "exits by a text": ("sys.exit('no data')", 1, "no data"),
    "raises": ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
    "raises two lines": ("raise ValueError('one\\ntwo')", 1, "ValueError: one"),
    "misses a module": ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
}


@dataclass
class Job:
    """A job that is running; ``folder`` is where its ranks write."""

    process: subprocess.Popen[str]
    folder: Path
    notes_monitors: bool = False
    ranks: int = 2

    def wait_for(self, name: str = "ready") -> None:
        """Waits until all ranks have left a note of this name. Their monitors are there, too."""
        end = time.monotonic() + longer(30)
        for pattern in (f"{name}-*", *(["monitor-*"] if self.notes_monitors else [])):
            while len(list(self.folder.glob(pattern))) < self.ranks:
                assert time.monotonic() < end, f"no {pattern} in time"
                assert self.process.poll() is None, self.process.communicate()
                time.sleep(0.02)

    def words(self, names: str) -> list[str]:
        return [word for file in self.folder.glob(names) for word in file.read_text().split()]

    def end(self) -> tuple[int, str, str]:
        """Exit status, the last line on standard error, all of it."""
        try:
            _, errors = self.process.communicate(timeout=longer(40))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            _, errors = self.process.communicate(timeout=20)
            pytest.fail(f"no end after 40 s\n{errors}")
        lines = errors.replace("\0", "").strip().splitlines()
        return self.process.returncode, lines[-1].strip() if lines else "", errors

    def nothing_is_left(self, within_s: float = GONE_S) -> None:
        end = time.monotonic() + within_s
        while left := [pid for pid in self.words("pids-*") if runs(pid)]:
            assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left]
            time.sleep(0.05)
        assert [name for name in self.words("memory-*") if os.path.exists(name)] == []


def runs(pid: str | int) -> bool:
    """Whether the process runs. A zombie, which a container without an init may keep, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(
    folder: Path, *options: str, by: str = REAL, variant: str = "usual", when: str | None = None, fault: str = "pass"
) -> Job:
    """Starts `FAULTY` on two ranks. when: place of the fault; None: "in MPI" on a real MPI, "without MPI" on a made-up one."""
    when = when or ("in MPI" if by == REAL else "without MPI")
    words = ("--quiet", *options, "-n", "2", script(folder, FAULTY), str(folder), when, fault)
    environ = clean_environment(TEST_RUN_PARENT=str(os.getpid()), OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        command(folder, by, *words, variant=variant), cwd=folder, env=environ,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    return Job(process, folder, by != REAL)
