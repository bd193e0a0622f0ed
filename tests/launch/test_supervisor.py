"""Whatever goes wrong in a job: its status is not 0, its last line names rank and cause, no process and no memory is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import clean_environment, is_open_mpi

pytestmark = pytest.mark.launch

STARTED_AGAIN = "mpicoll.run: mpiexec: exit status 213; no rank began; it is started once more\n"  # tests/launch/test_start.py
GONE_S = 15  # from the fault on, nothing of the job may run any more
JOB = """
import os, pathlib, signal, sys, time
folder, when, fault = pathlib.Path(sys.argv[1]), *sys.argv[2:4]
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])

def note(name, words):
    (folder / f".{name}").write_text(" ".join(map(str, words)))
    (folder / f".{name}").rename(folder / name)

def ancestors(pid):  # up to the process that has the environment of the test, which is mpicoll.run
    while pid > 1 and pid != int(os.environ["TEST_RUN_PARENT"]):
        yield pid
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

def here(place):
    if place == when and (rank == 1 or fault.startswith("all:")):
        exec(fault.removeprefix("all:"))

note(f"pids-{rank}", ancestors(os.getpid()))
here("before MPI")
from mpi4py import MPI
note(f"memory-{rank}", {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/" in line and "(deleted)" not in line})
MPI.COMM_WORLD.Barrier()
note(f"ready-{rank}", [])
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


@dataclass
class Job:
    """A job of two ranks that is running; ``folder`` is where its ranks write."""

    process: subprocess.Popen[str]
    folder: Path

    def wait_for(self, names: str, count: int = 2) -> None:
        end = time.monotonic() + 30
        while len(list(self.folder.glob(names))) < count:
            assert time.monotonic() < end, f"no {names} in time"
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def words(self, names: str) -> list[str]:
        return [word for file in self.folder.glob(names) for word in file.read_text().split()]

    def end(self) -> tuple[int, str, str]:
        """Exit status, the last line on standard error, all of it."""
        try:
            _, errors = self.process.communicate(timeout=40)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            _, errors = self.process.communicate(timeout=20)
            pytest.fail(f"no end after 40 s\n{errors}")
        lines = errors.replace("\0", "").strip().splitlines()
        return self.process.returncode, lines[-1].strip() if lines else "", errors

    def nothing_is_left(self, within_s: float = GONE_S) -> None:
        end = time.monotonic() + within_s
        while left := [pid for pid in self.words("pids-*") if _runs(pid)]:
            assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left]
            time.sleep(0.05)
        assert [name for name in self.words("memory-*") if os.path.exists(name)] == []


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def start(folder: Path, *options: str, when: str = "in MPI", fault: str = "pass", ranks: int = 2) -> Job:
    (folder / "job.py").write_text(JOB)
    command = [sys.executable, "-m", "mpicoll.run", "--quiet", *options, "-n", str(ranks), "job.py", str(folder), when, fault]
    process = subprocess.Popen(
        command, cwd=folder, env=clean_environment(TEST_RUN_PARENT=str(os.getpid()), OMP_NUM_THREADS="1"),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    return Job(process, folder)


KILL, SEGV = "os.kill(os.getpid(), signal.SIGKILL)", "os.kill(os.getpid(), signal.SIGSEGV)"
EARLY = "exit status 0 before the end of its program, by os._exit"


@pytest.mark.parametrize(
    ("when", "fault", "status", "cause"),
    [
        ("before MPI", KILL, 137, "killed by SIGKILL"),
        ("before MPI", "os._exit(5)", 5, "exit status 5"),
        ("before MPI", "sys.exit(3)", 3, "exit status 3"),
        ("before MPI", "import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("in MPI", KILL, 137, "killed by SIGKILL"),
        ("in MPI", SEGV, 139, "killed by SIGSEGV"),
        ("in MPI", "os._exit(0)", 1, EARLY),
        ("in MPI", "os._exit(5)", 5, "exit status 5"),
        ("in MPI", "sys.exit(3)", 3, "exit status 3"),
        ("in MPI", "sys.exit('no data')", 1, "no data"),
        ("in MPI", "raise KeyError('lost')", 1, "KeyError: 'lost'"),
        ("after MPI", "os._exit(5)", 5, "exit status 5"),
        ("after MPI", KILL, 137, "killed by SIGKILL"),
        ("in mpicoll", "raise ValueError('one\\ntwo')", 1, "ValueError: one"),
        ("in mpicoll", "sys.exit(3)", 3, "exit status 3"),
        ("after destroy", "sys.exit(3)", 3, "exit status 3"),
        ("after destroy", "raise KeyError('lost')", 1, "KeyError: 'lost'"),
    ],
)
def test_a_rank_fails(when: str, fault: str, status: int, cause: str, tmp_path: Path) -> None:
    job = start(tmp_path, when=when, fault=fault)
    returned, last, errors = job.end()
    assert (returned, last) == (status, f"mpicoll.run: rank 1 of 2 on {socket.gethostname()}: {cause}"), errors
    job.nothing_is_left()


OPERATION = """
import os, signal, sys, threading, time, torch, mpicoll as dist
where, fault = sys.argv[1:3]

def fail():
    time.sleep(2.2)  # meanwhile the watchdog looks
    exec(fault)

dist.init_process_group()
x = torch.ones(2)
for _ in range(3):
    dist.all_reduce(x)
if dist.get_rank() == 1:
    threading.Thread(target=fail).start()
    if where == "all_reduce":
        dist.all_reduce(x)
    elif where == "all_reduce async":
        work = dist.all_reduce(x, async_op=True)
    elif where == "recv":
        dist.recv(x, src=2)
time.sleep(40)
"""
CALL = r"collective {} on group '0', all_reduce\(SUM, float32, 8 bytes\)"
LAST, FOURTH = rf"it was outside of collectives; its last was {CALL.format(3)}", CALL.format(4)
AGO, SECONDS = r"[01]\.\d s before", r"\d s"
CRASH = "import ctypes; ctypes.string_at(0)"


@pytest.mark.parametrize(
    ("program", "where", "fault", "status", "cause"),
    [
        ("job.py", "all_reduce", KILL, 137, f"killed by SIGKILL; {AGO}, it was in its {FOURTH}, for {SECONDS}"),
        ("job.py", "all_reduce async", KILL, 137, f"killed by SIGKILL; {AGO}, its {FOURTH}, was under way"),
        ("python -X faulthandler job.py", "outside", CRASH, 139, f"killed by SIGSEGV; {AGO}, {LAST}"),
        ("-m job", "recv", "os._exit(5)", 5, f"exit status 5; {AGO}, it was in recv on group '0' with rank 2, for {SECONDS}"),
        ("-m job", "outside", "os._exit(0)", 1, f"{EARLY}; {AGO}, {LAST}"),
        ("job.py", "all_reduce", "raise KeyError('lost')", 1, f"KeyError: 'lost'; it was in its {FOURTH}, for {SECONDS}"),
        ("job.py", "all_reduce", "raise KeyError('in all_reduce')", 1, "KeyError: 'in all_reduce'"),
        ("job.py", "outside", "raise KeyError('lost')", 1, "KeyError: 'lost'"),
    ],
)
def test_the_operation_of_a_rank_that_fails(
    program: str, where: str, fault: str, status: int, cause: str, tmp_path: Path
) -> None:
    """A rank that is killed cannot say where it was. Its watchdog has written it, up to a second before."""
    (tmp_path / "job.py").write_text(OPERATION)
    command = [sys.executable, "-m", "mpicoll.run", "--quiet", "-n", "3", *program.split(), where, fault]
    environ = clean_environment(OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, errors="replace", timeout=55)
    last = done.stderr.replace("\0", "").strip().splitlines()[-1].strip()
    assert done.returncode == status, done.stderr
    assert re.fullmatch(rf"mpicoll\.run: rank 1 of 3 on {re.escape(socket.gethostname())}: {cause}", last), done.stderr
    if "faulthandler" in program:
        assert "Fatal Python error: Segmentation fault" in done.stderr
        assert "in fail" in done.stderr


def test_a_job_that_ends_well_says_nothing(tmp_path: Path) -> None:
    for when, fault in (("in mpicoll", "pass"), ("after destroy", "all:sys.exit(0)"), ("after MPI", "pass")):
        job = start(tmp_path, when=when, fault=fault)
        returned, _, errors = job.end()
        assert (returned, errors.replace(STARTED_AGAIN, "")) == (0, "")
        job.nothing_is_left(0)


def test_abort_of_mpi_gives_its_status(tmp_path: Path) -> None:
    """Hydra kills the monitors too, and no report says which rank has called MPI_Abort."""
    job = start(tmp_path, fault="MPI.COMM_WORLD.Abort(7)")
    returned, last, errors = job.end()
    who = "rank 1 of 2 on " if is_open_mpi() else "mpiexec: exit status 7"
    assert returned == 7, errors
    assert last.startswith(f"mpicoll.run: {who}"), errors
    job.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: signal.Signals(number).name)
def test_the_supervisor_is_told_to_end(number: int, tmp_path: Path) -> None:
    job = start(tmp_path, fault="all:time.sleep(60)")
    job.wait_for("ready-*")
    job.process.send_signal(number)
    returned, last, errors = job.end()
    assert (returned, last) == (128 + number, f"mpicoll.run: ended by {signal.Signals(number).name}"), errors
    job.nothing_is_left(1)


COUNT = """all:
signal.signal(signal.SIGUSR2, lambda *_: note(f"got-{rank}", []))
note(f"armed-{rank}", [])
while not (folder / f"got-{rank}").exists():
    time.sleep(0.05)
"""


def test_a_signal_of_the_user_reaches_every_rank(tmp_path: Path) -> None:
    """(MPICH's mpiexec ended on it.)"""
    job = start(tmp_path, fault=COUNT)
    job.wait_for("armed-*")
    job.process.send_signal(signal.SIGUSR2)
    assert job.end()[::2] == (0, "")
    assert len(list(tmp_path.glob("got-*"))) == 2


IGNORE = "all:[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; note(f'deaf-{rank}', []); time.sleep(60)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: signal.Signals(number).name)
def test_ranks_that_ignore_signals_are_killed_after_the_grace(number: int, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "2", fault=IGNORE)
    job.wait_for("deaf-*")
    job.process.send_signal(number)
    begin = time.monotonic()
    assert job.end()[0] == 128 + number
    assert time.monotonic() - begin < GONE_S
    job.nothing_is_left(1)


@pytest.mark.parametrize("fault", ["all:time.sleep(60)", IGNORE], ids=["obey", "ignore SIGTERM"])
def test_the_supervisor_is_killed(fault: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "2", fault=fault)
    job.wait_for("ready-*" if fault != IGNORE else "deaf-*")
    job.process.kill()
    job.nothing_is_left()
    job.process.communicate(timeout=10)


def test_mpiexec_is_killed(tmp_path: Path) -> None:
    job = start(tmp_path, fault="all:time.sleep(60)")
    job.wait_for("ready-*")
    (mpiexec,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(mpiexec), signal.SIGKILL)
    returned, last, errors = job.end()
    assert returned != 0, errors
    assert last.startswith("mpicoll.run: "), errors
    job.nothing_is_left(1)


def test_a_rank_is_killed_by_its_pid_from_outside(tmp_path: Path) -> None:
    """The monitor is the parent of the rank: a signal for either of them ends both."""
    for ancestor, cause in ((0, "killed by SIGKILL"), (1, "its host or its monitor was lost")):
        folder = tmp_path / str(ancestor)
        folder.mkdir()
        job = start(folder, fault="all:time.sleep(60)")
        job.wait_for("ready-*")
        os.kill(int((folder / "pids-1").read_text().split()[ancestor]), signal.SIGKILL)
        returned, last, errors = job.end()
        mine = f"mpicoll.run: rank 1 of 2 on {socket.gethostname()}: {cause}"
        # mpiexec may notice first that a monitor is dead, and end the others.
        by_mpiexec = re.fullmatch(r"mpicoll\.run: mpiexec: exit status \d+; no rank said why", last)
        assert returned != 0
        assert last == mine or (ancestor == 1 and by_mpiexec), errors
        job.nothing_is_left(1)


def test_an_executable_that_is_not_python(tmp_path: Path) -> None:
    for words, status in (("exit 0", 0), ("exit 4", 4), ("kill -SEGV $$", 139)):
        command = [sys.executable, "-m", "mpicoll.run", "--quiet", "-n", "1", "--no-python", "sh", "-c", words]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=40)
        assert done.returncode == status, done.stderr
        assert ("mpicoll.run: rank 0 of 1 on " in done.stderr) == (status != 0)


def test_a_job_needs_no_home(tmp_path: Path) -> None:
    """In a cron job or a container HOME may be missing; then Open MPI's mpiexec refuses to start."""
    environ = {name: value for name, value in clean_environment().items() if name != "HOME"}
    command = [
        sys.executable,
        "-m",
        "mpicoll.run",
        "--quiet",
        "-n",
        "1",
        "--no-python",
        "sh",
        "-c",
        'test -d "$HOME" && echo well',
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=40)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


RESTARTED = """
import os, signal
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
count, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
from mpi4py import MPI
print(f"attempt {count} of {most}, port {os.environ['MASTER_PORT']}", flush=True)
MPI.COMM_WORLD.Barrier()
if rank == 1 and count < int(os.environ["FAILURES"]):
    os.kill(os.getpid(), signal.SIGKILL)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(("failures", "status"), [(1, 0), (5, 137)])
def test_a_job_is_started_again(failures: int, status: int, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(RESTARTED)
    command = [sys.executable, "-m", "mpicoll.run", "--quiet", "--max-restarts", "1", "-n", "2", "job.py"]
    environ = clean_environment(FAILURES=str(failures), OMP_NUM_THREADS="1")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=55)
    assert done.returncode == status, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("attempt"))  # Hydra writes to stdout, too
    assert [line.split(",")[0] for line in lines] == ["attempt 0 of 1"] * 2 + ["attempt 1 of 1"] * 2
    assert len({line.split("port ")[1] for line in lines}) == 2
    assert done.stderr.count("mpicoll.run: rank 1 of 2 on ") == (2 if status else 1)
    assert done.stderr.count("mpicoll.run: restart 1 of 1 in 1 s\n") == 1


def test_a_job_that_is_told_to_end_is_not_started_again(tmp_path: Path) -> None:
    job = start(tmp_path, "--max-restarts", "3", fault="all:time.sleep(60)")
    job.wait_for("ready-*")
    job.process.terminate()
    returned, last, errors = job.end()
    assert (returned, last) == (143, "mpicoll.run: ended by SIGTERM"), errors


def test_exec_becomes_mpiexec(tmp_path: Path) -> None:
    job = start(tmp_path, "--exec", fault="all:time.sleep(60)")
    job.wait_for("ready-*")
    assert Path(f"/proc/{job.process.pid}/comm").read_text().strip() in ("mpiexec", "mpirun", "prterun", "mpiexec.hydra")
    job.process.terminate()
    assert "mpicoll.run: " not in job.end()[2]
