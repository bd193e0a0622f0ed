"""`python -m mpicoll.run`: its command line, and jobs that it really starts."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import mpicoll._launch.run as run
from mpicoll import _cpus
from mpicoll._discovery import detect, find
from mpicoll._discovery.hostfile import Host
from mpicoll._launch import command_line
from mpicoll.errors import LaunchError
from tests.support import ROOT, clean_environment, launch

# --- the command line ---


def test_the_programs_own_options_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").touch()
    options, (program,) = command_line.parse(["-n", "2", "--quiet", "t.py", "-n", "3", "--mpi", "x", "-m", "--help"])
    assert program.command == ("t.py", "-n", "3", "--mpi", "x", "-m", "--help")
    assert program.ranks == 2
    assert options == command_line.Options(quiet=True)
    _, (program,) = command_line.parse(["-n", "2", "-m", "pkg.mod", "-n", "3", "--", "t.py"])
    assert program.command == ("-m", "pkg.mod", "-n", "3", "--", "t.py")
    _, programs = command_line.parse(["-n", "1", "t.py", "a", ":", "-n", "2", "--host", "b", "-m", "mod"])
    assert [(p.command, p.ranks, p.hosts) for p in programs] == [
        (("t.py", "a"), 1, None),
        (("-m", "mod"), 2, (Host("b", None),)),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "no program"),
        ("-n 0 t.py", "'0' is not a number of ranks"),
        ("-n 2 --host a --hostfile b t.py", "not allowed with"),
        ("-n 2 -m", "-m needs the name of a module"),
        ("-n 2 true : ", "a program is missing"),
        ("-n 1 --no-python true : -n 1 --mpi mpich --no-python true", "--mpi holds for the whole job"),
        ("--nprocs 2 t.py", "--nprocs"),
    ],
)
def test_a_bad_command_line_says_what_is_wrong(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, LaunchError)) as raised:
        command_line.parse(shlex.split(line))
    assert words in capsys.readouterr().err + str(raised.value)


def test_a_script_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"nothing\.py: no such file in .*--no-python"):
        command_line.parse(["-n", "2", "nothing.py"])
    with pytest.raises(LaunchError, match="no such program"):
        command_line.parse(["-n", "2", "--no-python", "./no-such-program"])


def test_every_launcher_has_a_command() -> None:
    assert set(run.OUTER_COMMANDS) == {launcher for launcher, _ in detect._READERS}


def test_usable_cores() -> None:
    assert 1 <= _cpus.usable_cores() <= (os.cpu_count() or 1)


# --- jobs that are really started ---

RANK = 'int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])'


def start(*words: str, cwd: Path, timeout_s: float = 50, **environ: str) -> subprocess.CompletedProcess[str]:
    """`python -m mpicoll.run words...`, ended after timeout_s."""
    here = clean_environment()
    here.pop("OMP_NUM_THREADS", None)  # CI sets it, and mpicoll.run has something to say where nobody does
    here.update(environ)
    command = [sys.executable, "-m", "mpicoll.run", *words]
    return subprocess.run(command, cwd=cwd, env=here, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)


def script(folder: Path, text: str, name: str = "job.py") -> str:
    (folder / name).write_text(f"import os, sys, time\n{text}\n")
    return name


WHO = """
from mpi4py import MPI
world = MPI.COMM_WORLD
names = [f"{r}of{world.size} {a}" for r, a in enumerate(world.gather(" ".join(sys.argv[1:])) or [])]
if world.rank == 0: print(names, os.environ["OMP_NUM_THREADS"], os.environ["MASTER_ADDR"], __name__, flush=True)
"""


@pytest.mark.launch
def test_ranks_are_one_world(tmp_path: Path) -> None:
    name = script(tmp_path, WHO)
    done = start("-n", "3", name, "a", "-n", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['0of3 a -n', '1of3 a -n', '2of3 a -n']")
    assert done.stdout.endswith("localhost __main__\n")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mpicoll.run: env ")
    assert f"{name} a -n" in last
    assert "OMP_NUM_THREADS=" in done.stderr
    assert start("--quiet", "-n", "1", name, cwd=tmp_path, OMP_NUM_THREADS="1").stderr == ""


@pytest.mark.launch
def test_the_printed_command_is_the_command(tmp_path: Path) -> None:
    name = script(tmp_path, WHO)
    dry = start("--dry-run", "-n", "2", name, "it's", cwd=tmp_path)
    assert dry.returncode == 0
    assert dry.stderr == ""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(dry.stdout, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50)
    assert done.stdout.startswith('["0of2 it\'s", "1of2 it\'s"]'), done.stderr


@pytest.mark.launch
def test_modules_and_several_programs(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", WHO, "mod.py")
    name = script(tmp_path, WHO)
    done = start("-n", "1", name, "A", ":", "-n", "2", "-m", "package.mod", "B", cwd=tmp_path)
    assert done.stdout.startswith("['0of3 A', '1of3 B', '2of3 B']"), done.stderr


@pytest.mark.launch
def test_lines_that_users_of_torchrun_and_mpirun_type(tmp_path: Path) -> None:
    name = script(tmp_path, WHO)
    for line in (
        f"-n 2 python {name} A",
        f"-n 2 python -W error -m {name.removesuffix('.py')} A",
        f"--nproc_per_node=2 --nnodes=1 --standalone --rdzv_backend=c10d --max-restarts=0 {name} A",
        f"-H localhost -N 2 --oversubscribe --bind-to none {name} A",
    ):
        done = start(*line.split(), cwd=tmp_path)
        assert done.stdout.startswith("['0of2 A', '1of2 A']"), (line, done.stderr)


SPAWNS = """
import os, sys
import torch, mpicoll as dist
from mpi4py import MPI
parent = MPI.Comm.Get_parent()
if parent == MPI.COMM_NULL:
    count = int(sys.argv[1])
    children = MPI.COMM_SELF.Spawn(sys.executable, [os.path.abspath(__file__)], maxprocs=count)
    print(children.gather(None, root=MPI.ROOT), flush=True)
    children.Disconnect()
else:
    dist.init_process_group()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    parent.gather(tensor.tolist(), root=0)
    parent.Disconnect()
"""


@pytest.mark.launch
def test_a_rank_starts_more_processes_than_there_are_cores(tmp_path: Path) -> None:
    """(--oversubscribe had no effect. Open MPI refused them with "not enough slots", as under plain mpiexec.)"""
    count = _cpus.usable_cores() + 1
    done = start("--oversubscribe", "-n", "1", script(tmp_path, SPAWNS), str(count), cwd=tmp_path)
    assert done.stdout.strip() == str([[float(count)] * 2] * count), done.stderr


@pytest.mark.launch
def test_ranks_are_bound_as_asked(tmp_path: Path) -> None:
    if _cpus.usable_cores() < 2:
        pytest.skip("two ranks need a core each")
    name = script(tmp_path, "print(len(os.sched_getaffinity(0)), flush=True)")
    every = str(len(os.sched_getaffinity(0)))
    for words, expected in (([], every), (["--bind-to", "hwthread"], "1"), (["--bind-to", "none"], every)):
        done = start(*words, "-n", "2", name, cwd=tmp_path)
        assert done.stdout.split() == [expected] * 2, (words, done.stderr)


TALK = f"""
rank = {RANK}
for i in range(3):
    print("line", i, "of", rank)
print("half", end=" "); print("whole", rank)
print("error", rank, file=sys.stderr)
"""


@pytest.mark.launch
def test_tagged_lines_stay_whole(tmp_path: Path) -> None:
    name = script(tmp_path, TALK)
    done = start("--quiet", "--tag-output", "-n", "2", name, cwd=tmp_path)
    for rank in (0, 1):
        lines = [line for line in done.stdout.splitlines() if re.match(rf"\[(1,)?{rank}\]", line)]
        assert [re.sub(r"^\S+ ", "", line) for line in lines] == [
            *(f"line {i} of {rank}" for i in range(3)), f"half whole {rank}",
        ]  # fmt: skip
        assert re.search(rf"^\[(1,)?{rank}\]\S* error {rank}$", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.launch
def test_log_files_hold_all_that_a_rank_writes(tmp_path: Path) -> None:
    """What a child process writes, and the traceback of an exception, too."""
    name = script(tmp_path, TALK + "os.system('echo child')\nfrom mpi4py import MPI\nif rank == 1: raise KeyError('lost')")
    done = start("--quiet", "--log-dir", "logs/new", "-n", "2", name, cwd=tmp_path)
    assert done.returncode == 1
    # Not the word "line": PMIx may report the lost rank with a line of its own source.
    assert not re.search(r"line \d of|half whole|child", done.stdout + done.stderr)
    assert sorted(path.name for path in (tmp_path / "logs/new").iterdir()) == ["rank-0.log", "rank-1.log"]
    for rank in (0, 1):
        text = (tmp_path / f"logs/new/rank-{rank}.log").read_text()
        assert f"line 2 of {rank}\nhalf whole {rank}\nerror {rank}\nchild\n" in text
        assert ("KeyError: 'lost'" in text) == (rank == 1)
    done = start("--quiet", "--log-dir", "logs", "-n", "2", "--no-python", "echo", "hello", cwd=tmp_path)
    assert [(tmp_path / f"logs/rank-{rank}.log").read_text() for rank in (0, 1)] == ["hello\n"] * 2


@pytest.mark.launch
def test_hostfiles_of_either_syntax_start_ranks_here(tmp_path: Path) -> None:
    name = script(tmp_path, WHO)
    for text in ("localhost slots=2\n", "localhost:2\n"):
        (tmp_path / "hosts").write_text(text)
        done = start("--hostfile", "hosts", name, cwd=tmp_path)
        assert done.stdout.startswith("['0of2 ', '1of2 ']"), done.stderr


@pytest.mark.launch
@pytest.mark.parametrize("before_mpi", [True, False], ids=["before MPI", "after MPI"])
def test_the_exit_status_of_a_failing_rank_comes_through(before_mpi: bool, tmp_path: Path) -> None:
    first, second = ("", "from mpi4py import MPI") if before_mpi else ("from mpi4py import MPI", "")
    name = script(tmp_path, f"{first}\nif {RANK} == 1: sys.exit(3)\n{second}")
    done = start("-n", "2", name, cwd=tmp_path)
    # Open MPI's mpiexec may crash, or must be killed, if a rank fails while others start MPI (mpicoll._launch.mpiexec_reaper)
    crashes = (-signal.SIGKILL, -signal.SIGABRT, -signal.SIGSEGV)
    assert done.returncode in ((3, *crashes) if before_mpi else (3,)), done.stderr


@pytest.mark.launch
@pytest.mark.parametrize(
    "others", ["from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()", "time.sleep(45)"], ids=["in MPI", "asleep"]
)
def test_a_rank_that_fails_before_mpi_starts_ends_the_job(others: str, tmp_path: Path) -> None:
    """Both MPIs would hang here: MPICH's mpiexec goes on, and Open MPI's may be stuck when all ranks are gone."""
    name = script(tmp_path, f"if {RANK} == 1: import no_such_module\n{others}")
    begin = time.monotonic()
    done = start("-n", "2", name, cwd=tmp_path)
    assert time.monotonic() - begin < 30
    assert done.returncode != 0
    assert "No module named 'no_such_module'" in done.stderr
    assert "mpicoll/_launch/rank.py" not in done.stderr  # the traceback is the program's own


@pytest.mark.launch
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_signals_reach_the_ranks(number: int, tmp_path: Path) -> None:
    text = """
import signal
def note(number, frame):
    open(f"signal-{rank}", "w").write(str(number))
    time.sleep(1)  # a rank that has ended may end the others at once
    sys.exit(7)
rank = RANK
signal.signal(signal.SIGTERM, note); signal.signal(signal.SIGINT, note)
open(f"ready-{rank}", "w").close()
time.sleep(40)
""".replace("RANK", RANK)
    name = script(tmp_path, text)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen([sys.executable, "-m", "mpicoll.run", "--quiet", "-n", "2", name], cwd=tmp_path, env=environ)
    try:
        wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        job.send_signal(number)
        assert job.wait(20) != 0
        wait_for(lambda: len(list(tmp_path.glob("signal-*"))) == 2)
    finally:
        if job.poll() is None:
            job.kill()
            job.wait()


def wait_for(condition: Callable[[], bool], timeout_s: float = 45) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "nothing happened in time"
        time.sleep(0.05)


@pytest.mark.launch
def test_a_rank_can_start_a_job_of_its_own(tmp_path: Path) -> None:  # trap 57
    inner = script(tmp_path, WHO, "inner.py")
    outer = script(
        tmp_path,
        f"""
import subprocess
os.environ["_MPICOLL_OWNER_PID"] = str(os.getpid())
from mpicoll._discovery.detect import provide_torch_variables
from mpi4py import MPI
provide_torch_variables()
if MPI.COMM_WORLD.rank == 0:
    subprocess.run([sys.executable, "-m", "mpicoll.run", "-n", "3", "{inner}"], check=True, timeout=40)
MPI.COMM_WORLD.Barrier()
""",
        "outer.py",
    )
    done = start("--quiet", "-n", "2", outer, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['0of3 ', '1of3 ', '2of3 ']")


@pytest.mark.launch
def test_each_rank_of_an_mpiexec_starts_a_job(tmp_path: Path) -> None:
    """A mistake: ``mpirun -n 4 mpicoll run``. (Each of the ranks started a job of its own.)"""
    name = script(tmp_path, "open('started', 'w').close()")
    done = launch(4, "-m", "mpicoll.run", "-n", "2", name, cwd=tmp_path, fresh=True)
    assert done.returncode != 0
    assert done.stderr.count("mpicoll.run: this is rank 0 of 4 of mpi") == 1, done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.launch
def test_the_only_rank_of_an_mpiexec_starts_a_job(tmp_path: Path) -> None:
    done = launch(1, "-m", "mpicoll.run", "--quiet", "-n", "2", script(tmp_path, WHO), cwd=tmp_path, fresh=True)
    assert done.stdout.startswith("['0of2 ', '1of2 ']"), done.stderr


@pytest.mark.launch
def test_errors_are_one_message_without_a_traceback(tmp_path: Path) -> None:
    name = script(tmp_path, "")
    for words, environ in (
        (["nothing.py"], {}),
        (["--mpi", "/nowhere", name], {}),
        (["-n", "9", "--host", "a:2", name], {}),
        (["--hostfile", "/nowhere", name], {}),
        (["-n", "2", name], {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}),
    ):
        done = start(*words, cwd=tmp_path, **environ)
        assert done.returncode == 2, (words, done.stderr)
        assert done.stderr.startswith("mpicoll.run: ")
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


@pytest.mark.launch
def test_the_mpi_can_be_named_by_family_folder_library_or_mpiexec(tmp_path: Path) -> None:
    mpi, mpiexec = run.find(None, find.without_job(os.environ))
    assert mpi.library_file is not None
    name = script(tmp_path, WHO)
    for choice in (mpi.family, str(Path(mpiexec.path).parent.parent), mpi.library_file, mpiexec.path):
        done = start("--mpi", choice, "-n", "2", name, cwd=tmp_path)
        assert done.stdout.startswith("['0of2 ', '1of2 ']"), (choice, done.stderr)


@pytest.mark.launch
def test_a_script_finds_itself_as_under_plain_python(tmp_path: Path) -> None:
    """Under MPICH a rank's program is started by mpicoll._launch.rank; it must not see that."""
    name = script(
        tmp_path,
        """
import multiprocessing, pickle, __main__
class Thing: pass
def square(x): return x * x
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Thing)) is Thing and __main__.Thing is Thing
    assert sys.argv == ["job.py", "x"] and __file__ == os.path.abspath("job.py"), (sys.argv, __file__)
    assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path
    assert "main" not in globals() and "abort_job" not in globals()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(square, [3]) == [9]
    import atexit; atexit.register(lambda: print("end", Thing.__name__, flush=True))
""",
    )
    done = start("-n", "1", name, "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "end Thing\n"
