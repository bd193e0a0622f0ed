"""Jobs on the MPI that is installed: what ends them, in the places where MPI has a part in it; see test_supervisor.py.

A few cases run always, the others on request (--runslow): test_supervisor.py has them without MPI.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.launch.jobs import EARLY, FAULTS, KILL, run, script, start
from tests.support import is_open_mpi

pytestmark = pytest.mark.launch

STARTED_AGAIN = "mpicoll.run: mpiexec: exit status 213; no rank began; it is started once more\n"  # test_supervisor.py
HOST = socket.gethostname()
WAIT = "all:time.sleep(60)"
IGNORE = "all:[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; note(f'deaf-{rank}'); time.sleep(60)"


def on_request(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("when", "fault"),
    [
        ("before MPI", "misses a module"),  # the other rank hangs in MPI_Init, and Open MPI's mpiexec may hang
        on_request("before MPI", "is killed"),
        on_request("before MPI", "leaves by os._exit(5)"),
        on_request("before MPI", "exits by a number"),
        ("in MPI", "is killed"),
        on_request("in MPI", "crashes"),
        ("in MPI", "leaves by os._exit(0)"),  # MPICH's mpiexec returns 0
        on_request("in MPI", "leaves by os._exit(5)"),
        on_request("in MPI", "exits by a number"),
        on_request("in MPI", "exits by a text"),
        on_request("in MPI", "raises"),
        on_request("after MPI", "leaves by os._exit(5)"),
        on_request("after MPI", "is killed"),
        ("in mpicoll", "raises two lines"),
        on_request("in mpicoll", "exits by a number"),
        ("after destroy", "exits by a number"),
        on_request("after destroy", "raises"),
    ],
)
def test_a_rank_fails(when: str, fault: str, tmp_path: Path) -> None:
    what, status, cause = FAULTS[fault]
    job = start(tmp_path, when=when, fault=what)
    returned, last, errors = job.end()
    assert (returned, last) == (status, f"mpicoll.run: rank 1 of 2 on {HOST}: {cause}"), errors
    job.nothing_is_left()


@pytest.mark.slow
def test_a_rank_fails_before_mpi_while_another_one_sleeps(tmp_path: Path) -> None:
    begin = time.monotonic()
    done = run(tmp_path, "-n", "2", script(tmp_path, "if rank == 1: import no_such_module\ntime.sleep(45)"))
    assert time.monotonic() - begin < 30
    assert done.returncode != 0
    assert "No module named 'no_such_module'" in done.stderr
    assert "mpicoll/_launch/rank.py" not in done.stderr  # the traceback is the program's own


OPERATION = """
import threading, torch, mpicoll as dist
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
RECV = "it was in recv on group '0' with rank 2"
AGO, SECONDS = r"[01]\.\d s before", r"\d s"
CRASH = "import ctypes; ctypes.string_at(0)"


@pytest.mark.parametrize(
    ("program", "where", "fault", "status", "cause"),
    [
        ("job.py", "all_reduce", KILL, 137, f"killed by SIGKILL; {AGO}, it was in its {FOURTH}, for {SECONDS}"),
        on_request("job.py", "all_reduce async", KILL, 137, f"killed by SIGKILL; {AGO}, its {FOURTH}, was under way"),
        on_request("python -X faulthandler job.py", "outside", CRASH, 139, f"killed by SIGSEGV; {AGO}, {LAST}"),
        on_request("-m job", "recv", "os._exit(5)", 5, f"exit status 5; {AGO}, {RECV}, for {SECONDS}"),
        on_request("-m job", "outside", "os._exit(0)", 1, f"{EARLY}; {AGO}, {LAST}"),
        ("job.py", "all_reduce", "raise KeyError('lost')", 1, f"KeyError: 'lost'; it was in its {FOURTH}, for {SECONDS}"),
        on_request("job.py", "all_reduce", "raise KeyError('in all_reduce')", 1, "KeyError: 'in all_reduce'"),
        on_request("job.py", "outside", "raise KeyError('lost')", 1, "KeyError: 'lost'"),
    ],
)
def test_the_operation_of_a_rank_that_fails(
    program: str, where: str, fault: str, status: int, cause: str, tmp_path: Path
) -> None:
    """A rank that is killed cannot say where it was. Its watchdog has written it, up to a second before."""
    script(tmp_path, OPERATION)
    done = run(tmp_path, "--quiet", "-n", "3", *program.split(), where, fault, OMP_NUM_THREADS="1")
    last = done.stderr.replace("\0", "").strip().splitlines()[-1].strip()
    assert done.returncode == status, done.stderr
    assert re.fullmatch(rf"mpicoll\.run: rank 1 of 3 on {re.escape(HOST)}: {cause}", last), done.stderr
    if "faulthandler" in program:
        assert "Fatal Python error: Segmentation fault" in done.stderr
        assert "in fail" in done.stderr


@pytest.mark.parametrize(
    ("when", "fault"), [("after MPI", "pass"), on_request("in mpicoll", "pass"), on_request("after destroy", "all:sys.exit(0)")]
)
def test_a_job_that_ends_well_says_nothing(when: str, fault: str, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("number", "ready", "fault"),
    [
        (signal.SIGTERM, "ready", WAIT),
        on_request(signal.SIGINT, "ready", WAIT),
        on_request(signal.SIGHUP, "ready", WAIT),
        on_request(signal.SIGTERM, "deaf", IGNORE),
        on_request(signal.SIGINT, "deaf", IGNORE),
    ],
)
def test_the_supervisor_is_told_to_end(number: signal.Signals, ready: str, fault: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "2", fault=fault)
    job.wait_for(f"{ready}-*")
    job.process.send_signal(number)
    begin = time.monotonic()
    returned, last, errors = job.end()
    assert (returned, last) == (128 + number, f"mpicoll.run: ended by {number.name}"), errors
    assert time.monotonic() - begin < 15
    job.nothing_is_left(1)


HANDLE = """all:
def handle(number, frame):
    note(f"signal-{rank}", [number])
    time.sleep(1)  # a rank that has ended may end the others at once
    sys.exit(7)
signal.signal(signal.SIGTERM, handle); signal.signal(signal.SIGINT, handle)
note(f"armed-{rank}")
time.sleep(40)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, on_request(signal.SIGINT)])
def test_signals_reach_the_ranks(number: signal.Signals, tmp_path: Path) -> None:
    job = start(tmp_path, when="before MPI", fault=HANDLE)
    job.wait_for("armed-*")
    job.process.send_signal(number)
    assert job.end()[0] != 0
    assert len(list(tmp_path.glob("signal-*"))) == 2


COUNT = """all:
signal.signal(signal.SIGUSR2, lambda *_: note(f"got-{rank}"))
note(f"armed-{rank}")
while not (folder / f"got-{rank}").exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_signal_of_the_user_reaches_every_rank(tmp_path: Path) -> None:
    """(MPICH's mpiexec ended on it.)"""
    job = start(tmp_path, fault=COUNT)
    job.wait_for("armed-*")
    job.process.send_signal(signal.SIGUSR2)
    assert job.end()[::2] == (0, "")
    assert len(list(tmp_path.glob("got-*"))) == 2


@pytest.mark.parametrize("fault", [WAIT, on_request(IGNORE)], ids=["obey", "ignore SIGTERM"])
def test_the_supervisor_is_killed(fault: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "2", fault=fault)
    job.wait_for("ready-*" if fault != IGNORE else "deaf-*")
    job.process.kill()
    job.nothing_is_left()
    job.process.communicate(timeout=10)


@pytest.mark.parametrize(
    ("victim", "cause"),
    [("mpiexec", ".*"), ("rank", "killed by SIGKILL"), on_request("monitor", "its host or its monitor was lost")],
)
def test_a_process_of_the_job_is_killed_by_its_pid_from_outside(victim: str, cause: str, tmp_path: Path) -> None:
    """The monitor is the parent of the rank: a signal for either of them ends both."""
    job = start(tmp_path, fault=WAIT)
    job.wait_for("ready-*")
    rank, monitor, *_ = (tmp_path / "pids-1").read_text().split()
    (mpiexec,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int({"mpiexec": mpiexec, "rank": rank, "monitor": monitor}[victim]), signal.SIGKILL)
    returned, last, errors = job.end()
    assert returned != 0, errors
    if victim == "mpiexec":
        assert last.startswith("mpicoll.run: "), errors
    else:  # mpiexec may notice first that a monitor is dead, and end the others
        by_mpiexec = re.fullmatch(r"mpicoll\.run: mpiexec: exit status \d+; no rank said why", last)
        assert last == f"mpicoll.run: rank 1 of 2 on {HOST}: {cause}" or (victim == "monitor" and by_mpiexec), errors
    job.nothing_is_left(1)


def test_a_job_needs_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cron job or a container HOME may be missing; then Open MPI's mpiexec refuses to start."""
    monkeypatch.delenv("HOME", raising=False)
    done = run(tmp_path, "--quiet", "-n", "1", "--no-python", "sh", "-c", 'test -d "$HOME" && echo well')
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


RESTARTED = """
count, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
from mpi4py import MPI
print(f"attempt {count} of {most}, port {os.environ['MASTER_PORT']}", flush=True)
MPI.COMM_WORLD.Barrier()
if rank == 1 and count < 1:
    os.kill(os.getpid(), signal.SIGKILL)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.slow
def test_a_job_is_started_again(tmp_path: Path) -> None:
    done = run(tmp_path, "--quiet", "--max-restarts", "1", "-n", "2", script(tmp_path, RESTARTED), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("attempt"))  # Hydra writes to stdout, too
    assert [line.split(",")[0] for line in lines] == ["attempt 0 of 1"] * 2 + ["attempt 1 of 1"] * 2
    assert len({line.split("port ")[1] for line in lines}) == 2


def test_exec_becomes_mpiexec(tmp_path: Path) -> None:
    job = start(tmp_path, "--exec", fault=WAIT)
    job.wait_for("ready-*")
    assert Path(f"/proc/{job.process.pid}/comm").read_text().strip() in ("mpiexec", "mpirun", "prterun", "mpiexec.hydra")
    job.process.terminate()
    assert "mpicoll.run: " not in job.end()[2]
