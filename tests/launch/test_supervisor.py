"""Whatever ends a job: its status is not 0, its last line names rank and cause, and no process is left.

Here on a made-up mpiexec of either family (fake_mpiexec.py), without MPI; on the MPI that is installed in test_on_mpi.py.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import BY_FAKES, EARLY, FAKE, FAULTS, KILL, command, run, script, start
from tests.support import clean_environment

pytestmark = pytest.mark.launch

HOST = socket.gethostname()
WAIT = "all:time.sleep(60)"
IGNORE = "all:[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; note(f'deaf-{rank}'); time.sleep(60)"
by_signals = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)


@BY_FAKES
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "leaves by os._exit(0)"])
def test_a_rank_fails(fault: str, by: str, tmp_path: Path) -> None:
    what, status, cause = FAULTS[fault]
    job = start(tmp_path, by=by, fault=what)
    returned, last, errors = job.end()
    assert (returned, last) == (status, f"mpicoll.run: rank 1 of 2 on {HOST}: {cause}"), errors
    assert "mpicoll/_launch/rank.py" not in errors  # the traceback is the program's own
    job.nothing_is_left()


@BY_FAKES
def test_a_rank_leaves_with_status_0_and_another_one_fails_of_it(by: str, tmp_path: Path) -> None:
    job = start(tmp_path, by=by, fault="all:os._exit(0) if rank else [time.sleep(0.3), os._exit(14)]")
    returned, last, errors = job.end()
    assert (returned, last) == (1, f"mpicoll.run: rank 1 of 2 on {HOST}: {EARLY}"), errors


@BY_FAKES
@pytest.mark.parametrize(
    ("variant", "fault", "status"),
    [
        ("returns 0", KILL, 137),
        ("deaf", "os._exit(5)", 5),
        ("hangs", "all:os._exit(5) if rank else time.sleep(0.3)", 5),
        ("hangs", "all:sys.exit(0)", 0),
    ],
)
def test_an_mpiexec_that_errs(variant: str, fault: str, status: int, by: str, tmp_path: Path) -> None:
    """Open MPI's returned 0 after a lost daemon, MPICH's after one rank's os._exit(0); both hung after some failures."""
    job = start(tmp_path, "--grace", "1", by=by, variant=variant, fault=fault)
    returned, last, errors = job.end()
    if status:
        assert (returned, last.partition(": ")[2].partition(": ")[0]) == (status, f"rank 1 of 2 on {HOST}"), errors
    else:
        assert (returned, last) == (137, "mpicoll.run: mpiexec: killed by SIGKILL; no rank said why"), errors
    job.nothing_is_left(1)


@BY_FAKES
def test_a_job_that_ends_well_says_nothing(by: str, tmp_path: Path) -> None:
    job = start(tmp_path, by=by)
    assert job.end() == (0, "", "")
    job.nothing_is_left(0)


@BY_FAKES
@by_signals
@pytest.mark.parametrize("variant", ["usual", "deaf"])
def test_the_supervisor_is_told_to_end(variant: str, number: signal.Signals, by: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "1", "--max-restarts", "3", by=by, variant=variant, fault=WAIT)
    job.wait_for("ready-*")
    job.process.send_signal(number)
    returned, last, errors = job.end()
    assert (returned, last) == (128 + number, f"mpicoll.run: ended by {number.name}"), errors  # and no restart
    job.nothing_is_left(1)


CATCH = """all:
for number in signal.SIGUSR1, signal.SIGUSR2:
    signal.signal(number, lambda number, _: note(f"got-{number}-{rank}"))
note(f"armed-{rank}")
while not list(folder.glob(f"got-*-{rank}")):
    time.sleep(0.05)
"""


@BY_FAKES
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_signal_of_the_user_reaches_every_rank(number: signal.Signals, by: str, tmp_path: Path) -> None:
    """MPICH's mpiexec ended on it."""
    job = start(tmp_path, by=by, fault=CATCH)
    job.wait_for("armed-*")
    job.wait_for("monitor-*")
    job.process.send_signal(number)
    assert job.end() == (0, "", "")
    assert {path.name for path in tmp_path.glob("got-*")} == {f"got-{int(number)}-{rank}" for rank in (0, 1)}


@BY_FAKES
@by_signals
def test_ranks_that_ignore_signals_are_killed_after_the_grace(number: signal.Signals, by: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "0.5", by=by, fault=IGNORE)
    job.wait_for("deaf-*")
    job.process.send_signal(number)
    assert job.end()[0] == 128 + number
    job.nothing_is_left(1)


@BY_FAKES
def test_ranks_have_the_grace_to_end_by_themselves(by: str, tmp_path: Path) -> None:
    """Open MPI's mpiexec itself waits for less than that."""
    fault = """all:
def leave(*_):
    time.sleep(0.1 if OPENMPI else 1)
    note(f"saved-{rank}")
    sys.exit()
signal.signal(signal.SIGTERM, leave)
note(f"armed-{rank}")
time.sleep(60)
""".replace("OPENMPI", str(by == "openmpi"))
    job = start(tmp_path, "--grace", "20", by=by, fault=fault)
    job.wait_for("armed-*")
    job.process.terminate()
    assert job.end()[0] == 143
    assert len(list(tmp_path.glob("saved-*"))) == 2


@BY_FAKES
@pytest.mark.parametrize("fault", [WAIT, IGNORE], ids=["obey", "ignore SIGTERM"])
def test_the_supervisor_is_killed(fault: str, by: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "1", by=by, fault=fault)
    job.wait_for("deaf-*" if fault == IGNORE else "ready-*")
    job.process.kill()
    job.nothing_is_left()
    job.process.communicate(timeout=10)


@BY_FAKES
def test_mpiexec_is_killed(by: str, tmp_path: Path) -> None:
    job = start(tmp_path, by=by, fault=WAIT)
    job.wait_for("ready-*")
    (mpiexec,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(mpiexec), signal.SIGKILL)
    returned, last, errors = job.end()
    assert returned != 0, errors
    assert last.startswith("mpicoll.run: "), errors
    job.nothing_is_left(1)


@BY_FAKES
@pytest.mark.parametrize(("ancestor", "cause"), [(0, "killed by SIGKILL"), (1, "its host or its monitor was lost")])
def test_a_rank_is_killed_by_its_pid_from_outside(ancestor: int, cause: str, by: str, tmp_path: Path) -> None:
    """The monitor is the parent of the rank: a signal for either of them ends both."""
    job = start(tmp_path, by=by, fault=WAIT)
    job.wait_for("ready-*")
    job.wait_for("monitor-*")
    os.kill(int((tmp_path / "pids-1").read_text().split()[ancestor]), signal.SIGKILL)
    returned, last, errors = job.end()
    # mpiexec may notice first that a monitor is dead, and end the others.
    by_mpiexec = re.fullmatch(r"mpicoll\.run: mpiexec: exit status \d+; no rank said why", last)
    assert returned != 0
    assert last == f"mpicoll.run: rank 1 of 2 on {HOST}: {cause}" or (ancestor == 1 and by_mpiexec), errors
    job.nothing_is_left(1)


@BY_FAKES
@pytest.mark.parametrize(("words", "status"), [("exit 0", 0), ("exit 4", 4), ("kill -SEGV $$", 139)])
def test_an_executable_that_is_not_python(words: str, status: int, by: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--quiet", "-n", "1", "--no-python", "sh", "-c", words, by=by)
    assert done.returncode == status, done.stderr
    assert ("mpicoll.run: rank 0 of 1 on " in done.stderr) == (status != 0)


WAS = "it was in its collective 4 on group '0', all_reduce(SUM, float32, 8 bytes)"


@BY_FAKES
@pytest.mark.parametrize(
    ("program", "fault", "status", "cause"),
    [
        ("job.py", KILL, 137, rf"killed by SIGKILL; 0\.\d s before, {re.escape(WAS)}"),
        ("python -X faulthandler job.py", "import ctypes; ctypes.string_at(0)", 139, rf"killed by SIGSEGV; .*{re.escape(WAS)}"),
        ("-m job", "os._exit(5)", 5, rf"exit status 5; .*{re.escape(WAS)}"),
        ("-m job", "raise KeyError('lost')", 1, "KeyError: 'lost'"),
    ],
)
def test_what_a_rank_was_doing(program: str, fault: str, status: int, cause: str, by: str, tmp_path: Path) -> None:
    """A rank that is killed cannot say it. It has written it before; an exception says itself what matters."""
    script(tmp_path, f"from mpicoll._discovery import last_call\nif rank == 1: last_call.write({WAS!r}); {fault}\ntime.sleep(60)")
    done = run(tmp_path, "--quiet", "-n", "2", *program.split(), by=by)
    last = done.stderr.replace("\0", "").strip().splitlines()[-1].strip()
    assert done.returncode == status, done.stderr
    assert re.fullmatch(rf"mpicoll\.run: rank 1 of 2 on {re.escape(HOST)}: {cause}", last), done.stderr
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == ("faulthandler" in program)


RESTARTED = """
count, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
print(f"attempt {count} of {most}, port {os.environ['MASTER_PORT']}\\n", end="", flush=True)
open(f"began-{rank}-{count}", "w").close()
while not os.path.exists(f"began-{1 - rank}-{count}"):
    time.sleep(0.01)
if rank == 1 and count < int(os.environ["FAILURES"]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@BY_FAKES
@pytest.mark.parametrize(("failures", "status"), [(1, 0), (5, 137)])
def test_a_job_is_started_again(failures: int, status: int, by: str, tmp_path: Path) -> None:
    name = script(tmp_path, RESTARTED)
    done = run(tmp_path, "--quiet", "--max-restarts", "1", "-n", "2", name, by=by, FAILURES=str(failures))
    assert done.returncode == status, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(",")[0] for line in lines] == ["attempt 0 of 1"] * 2 + ["attempt 1 of 1"] * 2
    assert len({line.split("port ")[1] for line in lines}) == 2
    assert done.stderr.count("mpicoll.run: rank 1 of 2 on ") == (2 if status else 1)
    assert done.stderr.count("mpicoll.run: restart 1 of 1 in 0.5 s\n") == 1


@BY_FAKES
def test_exec_becomes_mpiexec(by: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--exec", by=by, fault=WAIT)
    job.wait_for("ready-*")
    assert "fake_mpiexec.py" in Path(f"/proc/{job.process.pid}/cmdline").read_text()
    job.process.terminate()
    assert "mpicoll.run: " not in job.end()[2]


@BY_FAKES
def test_an_mpiexec_that_hangs_after_exec_is_killed(by: str, tmp_path: Path) -> None:
    """Open MPI's, if a rank fails while others start MPI."""
    job = start(tmp_path, "--exec", by=by, variant="hangs" if by == "openmpi" else "usual")
    returned, last, errors = job.end()
    assert returned == (-signal.SIGKILL if by == "openmpi" else 0), errors
    assert ("all ranks have ended, but mpiexec" in last) == (by == "openmpi"), errors
    job.nothing_is_left(1)


AGAIN = "mpicoll.run: mpiexec: exit status 213; no rank began; it is started once more\n"
FAILED = "mpicoll.run: mpiexec: exit status {}; no rank began\n"


@pytest.mark.parametrize(
    ("family", "statuses", "options", "status", "said"),
    [
        ("openmpi", (213, 0), (), 0, AGAIN),
        ("openmpi", (213, 213, 0), (), 213, AGAIN + FAILED.format(213)),
        ("openmpi", (66, 0), (), 66, FAILED.format(66)),
        ("openmpi", (213, 0), ("--mpiexec-args=--unknown",), 213, FAILED.format(213)),
        ("mpich", (213, 0), (), 213, FAILED.format(213)),
    ],
)
def test_an_mpiexec_that_fails_before_a_rank_begins(
    family: str, statuses: tuple[int, ...], options: tuple[str, ...], status: int, said: str, tmp_path: Path
) -> None:
    """Open MPI's does so now and then. It is started once more, unless an option of the user may be the cause.

    The n-th start ends with ``statuses[n]``.
    """
    for number, each in enumerate(statuses):
        (tmp_path / f"status-{number}").write_text(str(each))
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\necho >> starts\nexit $(cat status-$(($(wc -l < starts) - 1)))\n")
    mpiexec.chmod(0o755)
    done = run(tmp_path, "--quiet", *options, "-n", "2", "--no-python", "true", by=family)
    assert (done.returncode, done.stderr) == (status, said)


@BY_FAKES
def test_each_rank_of_an_mpiexec_starts_a_job(by: str, tmp_path: Path) -> None:
    """A mistake: ``mpirun -n 4 mpicoll run``. (Each of the ranks started a job of its own.)"""
    inner = command(tmp_path, by, "-n", "2", script(tmp_path, "open('started', 'w').close()"))
    outer = [sys.executable, "-IS", str(FAKE), by, "usual", "-n", "4", *inner]
    done = subprocess.run(outer, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=50)
    assert done.returncode == 2
    assert done.stderr.count("mpicoll.run: this is rank 0 of 4 of mpi") == 1, done.stderr
    assert not (tmp_path / "started").exists()
