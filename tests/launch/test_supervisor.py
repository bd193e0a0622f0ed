"""Whatever ends a job: its status is not 0, its last line names rank and cause, and no process and no memory is left.

On a made-up mpiexec of either family, without MPI (fake_mpiexec.py), and on the MPI that is installed: always where MPI takes
part, otherwise on request (--runslow).
"""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import jobs
from tests.launch.jobs import BY_ALL, BY_ANY, BY_FAKES, EARLY, FAKES, FAULTS, KILL, REAL, run, script, start
from tests.support import LAUNCH_ENVIRONMENT, clean_environment, is_open_mpi
from tests.support import mpiexec as real_mpiexec

pytestmark = pytest.mark.launch

HOST = socket.gethostname()
STARTED_AGAIN = "mpicoll.run: mpiexec: exit status 213; no rank began; it is started once more\n"
WAIT = "all:time.sleep(60)"
IGNORE = "all:[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; note(f'deaf-{rank}'); time.sleep(60)"
by_signals = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)

ON_MPI = {
    "before MPI": ["misses a module"],  # the other rank hangs in MPI_Init, and Open MPI's mpiexec may hang
    "in MPI": ["is killed", "leaves by os._exit(0)"],  # MPICH's mpiexec returns 0
    "in mpicoll": ["raises two lines"],
    "after destroy": ["exits by a number"],
}
ON_MPI_AT_NIGHT = {
    "before MPI": ["is killed", "leaves by os._exit(5)", "exits by a number"],
    "in MPI": ["crashes", "leaves by os._exit(5)", "exits by a number", "exits by a text", "raises"],
    "after MPI": ["leaves by os._exit(5)", "is killed"],
    "in mpicoll": ["exits by a number"],
    "after destroy": ["raises"],
}


@pytest.mark.parametrize(
    ("by", "when", "fault"),
    [
        *[(by, "without MPI", fault) for by in FAKES for fault in FAULTS if fault != "leaves by os._exit(0)"],
        *[(REAL, when, fault) for when, faults in ON_MPI.items() for fault in faults],
        *[
            pytest.param(REAL, when, fault, marks=pytest.mark.slow)
            for when, faults in ON_MPI_AT_NIGHT.items()
            for fault in faults
        ],
    ],
)
def test_a_rank_fails(by: str, when: str, fault: str, tmp_path: Path) -> None:
    what, status, cause = FAULTS[fault]
    job = start(tmp_path, by=by, when=when, fault=what)
    returned, last, errors = job.end()
    assert (returned, last) == (status, f"mpicoll.run: rank 1 of 2 on {HOST}: {cause}"), errors
    # The traceback is the program's own. (Stacks that a watchdog shows have no comma there.)
    assert re.search(r'mpicoll/_launch/rank\.py", line \d+, in', errors) is None, errors
    job.nothing_is_left()


@pytest.mark.parametrize(("when", "status"), [("before MPI", 0), ("in MPI", 1), ("after MPI", 0)])
def test_all_ranks_leave_with_status_0(when: str, status: int, tmp_path: Path) -> None:
    """Without MPI_Finalize they have failed. mpiexec returns 0 or 1, for MPICH in the first and the last case as well."""
    early = rf"mpicoll\.run: rank [01] of 2 on {re.escape(HOST)}: {EARLY}, without MPI_Finalize"
    returned, last, errors = start(tmp_path, when=when, fault="all:os._exit(0)").end()
    assert returned == status, errors
    assert re.fullmatch(early if status else "", last), errors


@BY_FAKES
def test_a_rank_leaves_with_status_0_and_another_one_fails_of_it(by: str, tmp_path: Path) -> None:
    job = start(
        tmp_path, by=by, fault="all:__import__('ctypes').CDLL(None)._exit(0) if rank else [time.sleep(0.3), os._exit(14)]"
    )
    returned, last, errors = job.end()
    assert (returned, last) == (1, f"mpicoll.run: rank 1 of 2 on {HOST}: {EARLY}"), errors


@BY_FAKES
@pytest.mark.parametrize(
    ("variant", "fault", "status", "cause"),
    [
        ("returns 0", KILL, 137, f"rank 1 of 2 on {HOST}: killed by SIGKILL"),
        ("deaf", "os._exit(5)", 5, f"rank 1 of 2 on {HOST}: exit status 5"),
        ("hangs", "all:os._exit(5) if rank else time.sleep(0.3)", 5, f"rank 1 of 2 on {HOST}: exit status 5"),
        ("hangs", "pass", 137, "mpiexec: killed by SIGKILL; no rank said why"),
    ],
)
def test_an_mpiexec_that_errs(variant: str, fault: str, status: int, cause: str, by: str, tmp_path: Path) -> None:
    """Open MPI's returned 0 after a lost daemon, MPICH's after one rank's os._exit(0); both hung after some failures."""
    job = start(tmp_path, "--grace", "1", by=by, variant=variant, fault=fault)
    returned, last, errors = job.end()
    assert (returned, last) == (status, f"mpicoll.run: {cause}"), errors
    job.nothing_is_left(1)


@pytest.mark.parametrize(
    ("by", "when", "fault"),
    [
        *[(by, "without MPI", "pass") for by in FAKES],
        (REAL, "after MPI", "pass"),
        pytest.param(REAL, "in mpicoll", "pass", marks=pytest.mark.slow),
        pytest.param(REAL, "after destroy", "all:sys.exit(0)", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_ends_well_says_nothing(by: str, when: str, fault: str, tmp_path: Path) -> None:
    job = start(tmp_path, by=by, when=when, fault=fault)
    returned, _, errors = job.end()
    assert (returned, errors.replace(STARTED_AGAIN, "") if by == REAL else errors) == (0, "")
    job.nothing_is_left(0)


def test_abort_of_mpi_gives_its_status(tmp_path: Path) -> None:
    """Hydra kills the monitors too, and no report says which rank has called MPI_Abort."""
    job = start(tmp_path, fault="MPI.COMM_WORLD.Abort(7)")
    returned, last, errors = job.end()
    who = "rank 1 of 2 on " if is_open_mpi() else "mpiexec: exit status 7"
    assert returned == 7, errors
    assert last.startswith(f"mpicoll.run: {who}"), errors
    job.nothing_is_left()


@by_signals
@pytest.mark.parametrize(("by", "variant"), [*[(by, variant) for by in FAKES for variant in ("usual", "deaf")], (REAL, "usual")])
def test_the_supervisor_is_told_to_end(variant: str, number: signal.Signals, by: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "1", "--max-restarts", "3", by=by, variant=variant, fault=WAIT)
    job.wait_for()
    job.process.send_signal(number)
    returned, last, errors = job.end()
    assert (returned, last) == (128 + number, f"mpicoll.run: ended by {number.name}"), errors  # and no restart
    job.nothing_is_left(1)


CATCH = """all:
for number in signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2:
    signal.signal(number, lambda number, _: note(f"got-{rank}", [number]))
note(f"armed-{rank}")
while not (folder / f"got-{rank}").exists():
    time.sleep(0.05)
"""


@BY_ANY
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2], ids=lambda number: number.name)
def test_a_signal_of_the_user_reaches_every_rank(number: signal.Signals, by: str, tmp_path: Path) -> None:
    """MPICH's mpiexec ended on it."""
    job = start(tmp_path, by=by, fault=CATCH)
    job.wait_for("armed")
    job.process.send_signal(number)
    assert job.end() == (0, "", "")
    assert job.words("got-*") == [str(int(number))] * 2


@BY_ALL
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_ranks_have_time_to_end_by_themselves(number: signal.Signals, by: str, tmp_path: Path) -> None:
    """Open MPI's mpiexec gives them less than the grace: SIGKILL after a second."""
    after_s = {"openmpi": 0.1, "mpich": 1.5, REAL: 1.0}[by]  # a rank that has ended may end the others at once
    job = start(
        tmp_path, "--grace", "20", by=by, when="before MPI" if by == REAL else None, fault=f"{CATCH}time.sleep({after_s})"
    )
    job.wait_for("armed")
    job.process.send_signal(number)
    assert job.end()[0] == 128 + number
    assert len(job.words("got-*")) == 2


@BY_ANY
@by_signals
def test_ranks_that_ignore_signals_are_killed_after_the_grace(number: signal.Signals, by: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "0.5", by=by, fault=IGNORE)
    job.wait_for("deaf")
    job.process.send_signal(number)
    assert job.end()[0] == 128 + number
    job.nothing_is_left(1)


@pytest.mark.parametrize(
    ("ready", "fault", "by"),
    [
        *[(*how, by) for by in FAKES for how in (("ready", WAIT), ("deaf", IGNORE))],
        ("ready", WAIT, REAL),
        pytest.param("deaf", IGNORE, REAL, marks=pytest.mark.slow),
    ],
)
def test_the_supervisor_is_killed(ready: str, fault: str, by: str, tmp_path: Path) -> None:
    job = start(tmp_path, "--grace", "1", by=by, fault=fault)
    job.wait_for(ready)
    job.process.kill()
    job.nothing_is_left()
    job.process.communicate(timeout=10)


@BY_ALL
@pytest.mark.parametrize(
    ("victim", "cause"), [("mpiexec", ""), ("rank", "killed by SIGKILL"), ("monitor", "its host or its monitor was lost")]
)
def test_a_process_of_the_job_is_killed_by_its_pid(victim: str, cause: str, by: str, tmp_path: Path) -> None:
    """The monitor is the parent of the rank: a signal for either of them ends both."""
    job = start(tmp_path, by=by, fault=WAIT)
    job.wait_for()
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


@BY_ANY
@pytest.mark.parametrize(("words", "status"), [("exit 0", 0), ("exit 4", 4), ("kill -SEGV $$", 139)])
def test_an_executable_that_is_not_python(words: str, status: int, by: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--quiet", "-n", "1", "--no-python", "sh", "-c", words, by=by)
    assert done.returncode == status, done.stderr
    assert ("mpicoll.run: rank 0 of 1 on " in done.stderr) == (status != 0)


def test_a_job_needs_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cron job or a container HOME may be missing; then Open MPI's mpiexec refuses to start."""
    monkeypatch.delenv("HOME", raising=False)
    done = run(tmp_path, "--quiet", "-n", "1", "--no-python", "sh", "-c", 'test -d "$HOME" && echo well')
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


# --- what a rank was doing ---

WRITES = """
from mpicoll._base import last_words
if rank == 1: last_words.doing("it was in its FOURTH"); exec(sys.argv[2])
time.sleep(60)
"""
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
if rank == 1:
    threading.Thread(target=fail).start()
    if where == "all_reduce":
        dist.all_reduce(x)
    elif where == "all_reduce async":
        work = dist.all_reduce(x, async_op=True)
    elif where == "recv":
        dist.recv(x, src=2)
time.sleep(40)
"""
LAST = r"its last collective on group '0' was number 3, all_reduce\(SUM, float32, 2 elements\), which had ended"
FOURTH = r"its collective 4 on group '0', all_reduce\(SUM, float32, 2 elements\)"
RECV = "it was in recv on group '0' with rank 2"
AGO, SECONDS = r"[01]\.\d s before", r"\d s"
CRASH = "import ctypes; ctypes.string_at(0)"


@pytest.mark.parametrize(
    ("by", "program", "where", "fault", "status", "cause"),
    [
        *[
            (by, program, "", fault, status, cause)
            for by in FAKES
            for program, fault, status, cause in (
                ("job.py", KILL, 137, f"killed by SIGKILL; {AGO}, it was in its FOURTH"),
                ("python -X faulthandler job.py", CRASH, 139, f"killed by SIGSEGV; {AGO}, it was in its FOURTH"),
                ("-m job", "os._exit(5)", 5, f"exit status 5; {AGO}, it was in its FOURTH"),
                ("-m job", "raise KeyError('lost')", 1, "KeyError: 'lost'"),
            )
        ],
        (REAL, "job.py", "all_reduce", KILL, 137, f"killed by SIGKILL; {AGO}, it was in {FOURTH}, for {SECONDS}"),
        (REAL, "-m job", "all_reduce", "raise KeyError('lost')", 1, f"KeyError: 'lost'; it was in {FOURTH}, for {SECONDS}"),
        *[
            pytest.param(REAL, *case, marks=pytest.mark.slow)
            for case in (
                ("job.py", "all_reduce async", KILL, 137, f"killed by SIGKILL; {AGO}, it was in {FOURTH}, for {SECONDS}"),
                ("python -X faulthandler job.py", "outside", CRASH, 139, f"killed by SIGSEGV; {AGO}, {LAST}"),
                ("-m job", "recv", "os._exit(5)", 5, f"exit status 5; {AGO}, {RECV}, for {SECONDS}"),
                ("-m job", "outside", "os._exit(0)", 1, f"{EARLY}, without MPI_Finalize; {AGO}, {LAST}"),
                ("job.py", "all_reduce", "raise KeyError('in all_reduce')", 1, "KeyError: 'in all_reduce'"),
                ("job.py", "outside", "raise KeyError('lost')", 1, "KeyError: 'lost'"),
            )
        ],
    ],
)
def test_what_a_rank_that_fails_was_doing(
    by: str, program: str, where: str, fault: str, status: int, cause: str, tmp_path: Path
) -> None:
    """A rank that is killed cannot say it. Its watchdog has written it, up to a second before; an exception says it itself."""
    script(tmp_path, OPERATION if by == REAL else WRITES)
    done = run(tmp_path, "--quiet", "-n", "3", *program.split(), where, fault, by=by, OMP_NUM_THREADS="1")
    last = done.stderr.replace("\0", "").strip().splitlines()[-1].strip()
    assert done.returncode == status, done.stderr
    assert re.fullmatch(rf"mpicoll\.run: rank 1 of 3 on {re.escape(HOST)}: {cause}", last), done.stderr
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == ("faulthandler" in program)
    assert by != REAL or "faulthandler" not in program or "in fail" in done.stderr


# --- again ---

RESTARTED = """
count, most = (int(os.environ[f"TORCHELASTIC_{name}"]) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
print(f"attempt {count} of {most}, port {os.environ['MASTER_PORT']}\\n", end="", flush=True)
open(f"began-{rank}-{count}", "w").close()
while not os.path.exists(f"began-{1 - rank}-{count}"):
    time.sleep(0.01)
if rank == 1 and count < int(os.environ["FAILURES"]):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@BY_ANY
@pytest.mark.parametrize(("failures", "status"), [(1, 0), (5, 137)])
def test_a_job_is_started_again(failures: int, status: int, by: str, tmp_path: Path) -> None:
    name = script(tmp_path, RESTARTED)
    done = run(tmp_path, "--quiet", "--max-restarts", "1", "-n", "2", name, by=by, FAILURES=str(failures))
    assert done.returncode == status, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("attempt"))  # Hydra writes to stdout, too
    assert [line.split(",")[0] for line in lines] == ["attempt 0 of 1"] * 2 + ["attempt 1 of 1"] * 2
    assert len({line.split("port ")[1] for line in lines}) == 2
    assert done.stderr.count("mpicoll.run: rank 1 of 2 on ") == (2 if status else 1)
    assert len(re.findall(r"mpicoll\.run: restart 1 of 1 in (1|0\.5) s\n", done.stderr)) == 1


AGAIN, FAILED = STARTED_AGAIN, "mpicoll.run: mpiexec: exit status {}; no rank began\n"


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


@BY_ANY
def test_each_rank_of_an_mpiexec_starts_a_job(by: str, tmp_path: Path) -> None:
    """A mistake: ``mpirun -n 4 mpicoll run``. (Each of the ranks started a job of its own.)"""
    inner = jobs.command(tmp_path, by, "-n", "2", script(tmp_path, "open('started', 'w').close()"))
    mpiexec = [real_mpiexec()] if by == REAL else [sys.executable, "-IS", str(jobs.FAKE), by, "usual"]
    environ = clean_environment(**LAUNCH_ENVIRONMENT)
    done = subprocess.run([*mpiexec, "-n", "4", *inner], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50)
    assert done.returncode != 0
    assert done.stderr.count("mpicoll.run: this is rank 0 of 4 of mpi") == 1, done.stderr
    assert not (tmp_path / "started").exists()


@BY_FAKES
@pytest.mark.parametrize(("ranks", "culprit", "first"), [(48, 31, 23), (200, 0, 199), (1000, 999, 3)])
def test_one_of_many_ranks_is_killed_and_another_one_is_faster_to_say_so(
    ranks: int, culprit: int, first: int, by: str, tmp_path: Path
) -> None:
    """On 2 cores with 48 ranks of MPICH, each of the 47 that waited named itself before the monitor of the killed one had run."""
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\nexec {sys.executable} -IS {jobs.FAKE.with_name('scripts')}/many_ranks.py $@\n")
    mpiexec.chmod(0o755)
    done = run(tmp_path, "--quiet", "-n", str(ranks), "--no-python", "true", str(ranks), str(culprit), str(first), by=by)
    said = f"mpicoll.run: rank {culprit} of {ranks} on node{culprit % 4}: killed by SIGKILL; 0.5 s before, it computed\n"
    assert (done.returncode, done.stderr) == (137, said)
