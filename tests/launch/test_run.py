"""`python -m mpicoll.run`: its command line, and the jobs that it starts, on a made-up mpiexec or on MPI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpicoll._launch.run as run_module
from mpicoll._base import cpus
from mpicoll._base.inherited import without_job
from mpicoll._base.launcher import _READERS
from mpicoll._launch.find import installations
from mpicoll._launch.job import NOTHING_ASKED
from tests import support
from tests.launch.jobs import BY_ANY, run, script
from tests.support import LAUNCH_ENVIRONMENT, ROOT, launch
from tests.support import mpiexec as real_mpiexec


def test_every_launcher_has_a_command() -> None:
    assert set(run_module.OUTER_COMMANDS) == {launcher for launcher, _ in _READERS}


# --- jobs that need no MPI ---

SAY = "print(f'{rank}of{size} {chr(32).join(sys.argv[1:])}\\n', end='', flush=True)"


@pytest.mark.launch
@BY_ANY
def test_the_printed_command_is_the_command(by: str, tmp_path: Path) -> None:
    name = script(tmp_path, SAY)
    dry = run(tmp_path, "--dry-run", "-n", "2", name, "it's", by=by)
    assert (dry.returncode, dry.stderr) == (0, "")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(dry.stdout, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50)
    assert sorted(done.stdout.splitlines()) == ["0of2 it's", "1of2 it's"], done.stderr


TERMINAL = "print(f'{rank} {os.isatty(1)} {sys.stdout.isatty()}')\nos.system('test -t 1 && echo is a terminal')"


@pytest.mark.launch
def test_standard_output_is_a_terminal_only_where_that_of_the_job_is_one(tmp_path: Path) -> None:
    """mpiexec of Open MPI gives each rank a terminal: colours and progress bars went into the files of jobs."""
    name = script(tmp_path, TERMINAL)
    done = run(tmp_path, "--quiet", "-n", "2", name)
    assert sorted(done.stdout.splitlines()) == ["0 False False", "1 False False"], done.stderr
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "mpicoll.run", "--quiet", "-n", "2", name]
    environ = support.clean_environment(**LAUNCH_ENVIRONMENT)
    subprocess.run(command, cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, stdout=theirs, timeout=50, check=True)
    said = os.read(ours, 1 << 16).decode()
    for descriptor in (ours, theirs):
        os.close(descriptor)
    assert (said.count("True True"), said.count("is a terminal")) == ((2, 2) if support.is_open_mpi() else (0, 0)), said


@pytest.mark.launch
def test_output_through_the_pipe_is_whole(tmp_path: Path) -> None:
    """Of a program that writes much and then dies, and of a process that it leaves behind."""
    program = (
        "for n in range(20000): print(n)\nsys.stdout.flush(); os.system('(sleep 0.5; echo late) &'); os.kill(os.getpid(), 11)"
    )
    done = run(tmp_path, "--quiet", "-n", "1", script(tmp_path, program))
    assert done.returncode == 139
    assert done.stdout.splitlines()[:20000] == [str(n) for n in range(20000)]


@pytest.mark.launch
@BY_ANY
@pytest.mark.parametrize(
    "line",
    [
        "-n 2 python job.py A",
        "-n 2 python -W error -m job A",
        "--nproc_per_node=2 --nnodes=1 --standalone --rdzv_backend=c10d --max-restarts=0 job.py A",
        "-H localhost -N 2 --bind-to none job.py A",
        "--hostfile slots job.py A",
        "--hostfile colons job.py A",
        "-n 1 job.py A : -n 1 -m package.mod A",
    ],
)
def test_lines_that_users_of_torchrun_and_mpirun_type(line: str, by: str, tmp_path: Path) -> None:
    script(tmp_path, SAY)
    (tmp_path / "package").mkdir()
    script(tmp_path / "package", SAY, "mod.py")
    (tmp_path / "slots").write_text("localhost slots=2\n")
    (tmp_path / "colons").write_text("localhost:2\n")
    done = run(tmp_path, *line.split(), by=by)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["0of2 A", "1of2 A"]), done.stderr


TALK = """
for i in range(3):
    print("line", i, "of", rank)
print("half", end=" "); print("whole", rank)
print("error", rank, file=sys.stderr)
"""
FAIL = """
os.system("echo child")
open(f"wrote-{rank}", "w").close()
while not os.path.exists(f"wrote-{1 - rank}"):
    time.sleep(0.01)
if rank == 1:
    raise KeyError("lost")
"""


@pytest.mark.launch
@BY_ANY
def test_log_files_hold_all_that_a_rank_writes(by: str, tmp_path: Path) -> None:
    """What a child process writes, and the traceback of an exception, too."""
    done = run(tmp_path, "--quiet", "--log-dir", "logs/new", "-n", "2", script(tmp_path, TALK + FAIL), by=by)
    assert done.returncode == 1
    # Not the word "line": PMIx may report the lost rank with a line of its own source.
    assert not re.search(r"line \d of|half whole|child", done.stdout + done.stderr)
    assert sorted(path.name for path in (tmp_path / "logs/new").iterdir()) == ["rank-0.log", "rank-1.log"]
    for rank in (0, 1):
        text = (tmp_path / f"logs/new/rank-{rank}.log").read_text()
        assert f"line 2 of {rank}\nhalf whole {rank}\nerror {rank}\nchild\n" in text
        assert ("KeyError: 'lost'" in text) == (rank == 1)
    run(tmp_path, "--quiet", "--log-dir", "logs", "-n", "2", "--no-python", "echo", "hello", by=by)
    assert [(tmp_path / f"logs/rank-{rank}.log").read_text() for rank in (0, 1)] == ["hello\n"] * 2


@pytest.mark.launch
@BY_ANY
def test_a_script_finds_itself_as_under_plain_python(by: str, tmp_path: Path) -> None:
    """A rank's program is started by mpicoll._launch.rank; it must not see that."""
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
    done = run(tmp_path, "-n", "1", name, "x", by=by)
    assert (done.returncode, done.stdout) == (0, "end Thing\n"), done.stderr


@pytest.mark.launch
@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["nothing.py"], {}),
        (["--mpi", "/nowhere", "job.py"], {}),
        (["-n", "9", "--host", "a:2", "job.py"], {}),
        (["--hostfile", "/nowhere", "job.py"], {}),
        (["-n", "2", "job.py"], {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}),
    ],
)
def test_errors_are_one_message_without_a_traceback(words: list[str], environ: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path, "")
    done = run(tmp_path, *words, **environ)  # type: ignore[arg-type]
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("mpicoll.run: ")
    assert "Traceback" not in done.stderr


# --- jobs on MPI ---

WHO = """
from mpi4py import MPI
world = MPI.COMM_WORLD
names = [f"{r}of{world.size} {a}" for r, a in enumerate(world.gather(" ".join(sys.argv[1:])) or [])]
if world.rank == 0: print(names, os.environ["OMP_NUM_THREADS"], os.environ["MASTER_ADDR"], __name__, flush=True)
"""


@pytest.mark.launch
def test_ranks_are_one_world(tmp_path: Path) -> None:
    name = script(tmp_path, WHO)
    done = run(tmp_path, "-n", "3", name, "a", "-n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['0of3 a -n', '1of3 a -n', '2of3 a -n']")
    assert done.stdout.endswith("localhost __main__\n")
    assert done.stdout.split("] ")[1].split()[0].isdigit()  # OMP_NUM_THREADS
    assert done.stderr == ""
    code = "import os, sys; sys.stdout.write(f\"{sys.argv} {'__file__' in globals()}\\n\")"
    assert run(tmp_path, "-n", "2", "-c", code, "a b").stdout == "['-c', 'a b'] False\n" * 2
    said = run(tmp_path, "--verbose", "-n", "1", name, "a", OMP_NUM_THREADS="1").stderr
    assert said.startswith("mpicoll.run: env ")
    assert said.endswith(f"{name} a\n")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import torch.distributed", True),
        ("import subprocess, torch; subprocess.run(['/sbin/ldconfig', '-p'], capture_output=True)", True),
        ("import subprocess, sys, torch; subprocess.run([sys.executable, '-c', 'import torch'])", False),
        ("import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); d.destroy_process_group()", False),
        ("import torch; from mpi4py import MPI", False),
        ("print(1)", False),
    ],
    ids=["no group", "a short child", "a child with torch", "another backend", "MPI", "no torch"],
)
def test_ranks_that_do_not_work_together_are_told_so(program: str, told: bool, tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "-c", program, OMP_NUM_THREADS="1")
    alone = "mpicoll.run: 2 programs ran, each alone: none has called init_process_group or started MPI\n"
    assert (done.returncode, done.stderr) == (0, alone * told)


SPAWNS = """
from mpi4py import MPI
parent = MPI.Comm.Get_parent()
if parent == MPI.COMM_NULL:
    count = int(sys.argv[1])
    children = MPI.COMM_SELF.Spawn(sys.executable, [os.path.abspath(__file__)], maxprocs=count)
    print(children.gather(None, root=MPI.ROOT), flush=True)
    children.Disconnect()
else:
    import torch, mpicoll as dist
    dist.init_process_group()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    parent.gather(tensor.tolist(), root=0)
    parent.Disconnect()
"""


@pytest.mark.launch
def test_a_rank_starts_more_processes_than_there_are_cores(tmp_path: Path) -> None:
    """(Open MPI refused them with "not enough slots", as under plain mpiexec.)"""
    count = cpus.usable_cores() + 1
    done = run(tmp_path, "-n", "1", script(tmp_path, SPAWNS), str(count))
    assert done.stdout.strip() == str([[float(count)] * 2] * count), done.stderr


@pytest.mark.launch
@pytest.mark.skipif(cpus.usable_cores() < 2, reason="two ranks need a core each")
@pytest.mark.parametrize(
    "words", ["", "--bind-to hwthread", pytest.param("--bind-to none", marks=pytest.mark.slow)], ids=["free", "bound", "none"]
)
def test_ranks_are_bound_as_asked(words: str, tmp_path: Path) -> None:
    done = run(tmp_path, *words.split(), "-n", "2", script(tmp_path, "print(len(os.sched_getaffinity(0)), flush=True)"))
    expected = "1" if "hwthread" in words else str(len(os.sched_getaffinity(0)))
    assert done.stdout.split() == [expected] * 2, done.stderr


@pytest.mark.launch
def test_tagged_lines_stay_whole(tmp_path: Path) -> None:
    done = run(tmp_path, "--quiet", "--tag-output", "-n", "2", script(tmp_path, TALK))
    for rank in (0, 1):
        lines = [line for line in done.stdout.splitlines() if re.match(rf"\[(1,)?{rank}\]", line)]
        assert [re.sub(r"^\S+ ", "", line) for line in lines] == [
            *(f"line {i} of {rank}" for i in range(3)), f"half whole {rank}",
        ]  # fmt: skip
        assert re.search(rf"^\[(1,)?{rank}\]\S* error {rank}$", done.stderr, re.MULTILINE), done.stderr


@pytest.mark.launch
def test_a_rank_can_start_a_job_of_its_own(tmp_path: Path) -> None:  # trap 57
    inner = script(tmp_path, WHO, "inner.py")
    outer = f"""
import subprocess
os.environ["_MPICOLL_OWNER"] = str(os.getpid())
from mpicoll._base import torch_variables
from mpi4py import MPI
torch_variables.provide()
if MPI.COMM_WORLD.rank == 0:
    subprocess.run([sys.executable, "-m", "mpicoll.run", "-n", "3", "{inner}"], check=True, timeout=40)
MPI.COMM_WORLD.Barrier()
"""
    done = run(tmp_path, "--quiet", "-n", "2", script(tmp_path, outer, "outer.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("['0of3 ', '1of3 ', '2of3 ']")


AGAIN = """
import os, sys
import mpicoll as dist
dist.init_process_group()
ranks = dist.get_world_size()
dist.destroy_process_group()
if ranks == 1:
    os.execv(sys.argv[1], [sys.argv[1], "-n", "2", sys.executable, *sys.argv])
print(ranks)
"""


@pytest.mark.launch
def test_a_program_that_had_a_world_of_one_starts_itself_again_under_mpiexec(tmp_path: Path) -> None:
    again = tmp_path / "again.py"
    again.write_text(AGAIN)
    done = support.run([sys.executable, str(again), real_mpiexec()], env=LAUNCH_ENVIRONMENT)
    assert (done.returncode, done.stdout.split()) == (0, ["2", "2"]), done.stderr


@pytest.mark.launch
def test_the_only_rank_of_an_mpiexec_starts_a_job(tmp_path: Path) -> None:
    done = launch(1, "-m", "mpicoll.run", "--quiet", "-n", "2", script(tmp_path, WHO), cwd=tmp_path, fresh=True)
    assert done.stdout.startswith("['0of2 ', '1of2 ']"), done.stderr


@pytest.mark.launch
@pytest.mark.parametrize("kind", ["family", "folder", "library", "mpiexec"])
def test_the_mpi_can_be_named_by_family_folder_library_or_mpiexec(kind: str, tmp_path: Path) -> None:
    environ = without_job(os.environ)
    mpi = installations.find_mpi(NOTHING_ASKED.mpi, environ)
    mpiexec = installations.find_mpiexec(mpi, environ, NOTHING_ASKED.mpi)
    folder = str(Path(mpiexec.path).parent.parent)
    choice = {"family": mpi.family, "folder": folder, "library": mpi.library_file, "mpiexec": mpiexec.path}[kind]
    assert choice is not None
    done = run(tmp_path, "--mpi", choice, "-n", "2", script(tmp_path, WHO))
    assert done.stdout.startswith("['0of2 ', '1of2 ']"), (choice, done.stderr)
