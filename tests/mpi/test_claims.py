"""One process is one rank: whoever starts MPI as a rank that another process has is told so, and does not hang (trap 57)."""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpicoll._base import processes
from mpicoll._mpi.second_process import PREFIX, claim, connection_lost
from tests.support import LAUNCH_ENVIRONMENT, ROOT, is_open_mpi, launch, mpiexec, run

pytestmark = pytest.mark.launch
SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "claims.py")
LAUNCHED = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "job@1"}

# --- the claim itself, without MPI ---


@pytest.fixture(autouse=True)
def _this_process_holds_nothing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(claim, "_file", None)  # the session's own
    root = f"boot-{processes.namespace('pid')}-{os.getpid()}-{processes.start(os.getpid())}"
    if "root_of_a_rank" not in request.node.name:
        monkeypatch.setattr("mpicoll._mpi.second_process._root", lambda environ: root)  # this process has no launcher's variables
    yield
    claim.release()


def in_child(folder: Path, environ: dict[str, str], ends: str = "at once") -> str | None:
    """What a forked child that claims the rank is told; ``ends``: "at once", or by "finalize"."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        writer.send(claim.take(environ, folder))
        if ends == "finalize":
            claim.end()
        os._exit(0)
    os.waitpid(pid, 0)
    return reader.recv()  # type: ignore[no-any-return]


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    assert claim.take(LAUNCHED, tmp_path) is None
    assert claim.take(LAUNCHED, tmp_path) is None  # the same process again
    assert in_child(tmp_path, LAUNCHED) == f"process {os.getpid()} is rank 3 already"
    assert in_child(tmp_path, {**LAUNCHED, "OMPI_COMM_WORLD_RANK": "2"}) is None


def test_one_that_has_gone(tmp_path: Path) -> None:
    assert in_child(tmp_path, LAUNCHED, ends="finalize") is None
    assert list(tmp_path.iterdir()) == []
    assert in_child(tmp_path, LAUNCHED) is None
    refused = claim.take(LAUNCHED, tmp_path)
    assert refused is not None
    assert "was rank 3 before" in refused


def test_mpi_runs_once_in_a_rank_of_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_SERVER_TMPDIR", str(tmp_path))
    assert in_child(tmp_path, LAUNCHED, ends="finalize") is None
    refused = claim.take(LAUNCHED, tmp_path)
    assert refused is not None
    assert "was rank 3 before" in refused


@pytest.mark.skipif(os.getuid() != 0, reason="only root makes files of another user")
def test_files_of_another_user(tmp_path: Path) -> None:
    """In a public folder their names and their content are a stranger's: they neither refuse the rank nor count as one."""
    assert claim.take(LAUNCHED, tmp_path) is None
    [own] = tmp_path.iterdir()
    claim.release()
    namespace = own.name.split("-")[-3]
    names = [own.name, f"{PREFIX}0-{os.getuid()}-x-{namespace}-notanumber-1", PREFIX, f"{PREFIX}x-y"]
    for name in names:
        (tmp_path / name).write_text("1\n")
        os.chown(tmp_path / name, 65534, 65534)
    assert claim.take(LAUNCHED, tmp_path) is None
    assert claim.absent(LAUNCHED) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_a_name_of_this_user_that_is_no_claim(tmp_path: Path) -> None:
    strange = tmp_path / f"{PREFIX}0-{os.getuid()}-x-{processes.namespace('pid')}-notanumber-1"
    strange.touch()
    assert claim.take(LAUNCHED, tmp_path) is None
    assert strange.exists()


def test_a_child_does_not_hold_its_parents_claim(tmp_path: Path) -> None:
    """A worker of a DataLoader that outlives its rank, and the next process in the rank's place."""
    assert claim.take(LAUNCHED, tmp_path) is None
    pid = os.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", "30"])
    claim.release()
    assert claim.take(LAUNCHED, tmp_path) is None
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_no_launcher_no_folder_and_a_shell_of_srun(tmp_path: Path) -> None:
    assert claim.take({}, tmp_path) is None
    assert claim.take(LAUNCHED, tmp_path / "missing") is None
    shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
    assert claim.take(shell, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_over_is_removed(tmp_path: Path) -> None:
    assert in_child(tmp_path, LAUNCHED) is None
    (left,) = tmp_path.iterdir()
    head, start = left.name.rsplit("-", 1)
    left.rename(tmp_path / f"{head}-{int(start) - 1}")  # another process that had this process's id before it
    foreign = tmp_path / f"{PREFIX}0-{os.getuid() + 1}-x-1-1-1"
    foreign.touch()
    assert claim.take(LAUNCHED, tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([left.name, foreign.name])


def test_the_root_of_a_rank() -> None:
    """The same in a shell's program and in what that starts; another where the variables are another job's."""
    code = "import os; from mpicoll._mpi import second_process; print(second_process._root(os.environ), flush=True)"
    again = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}]); {code}"
    environ = {**os.environ, **LAUNCHED, "PYTHONPATH": str(ROOT)}

    def roots(**changed: str) -> list[str]:
        command = ["sh", "-c", f'"$0" -c "$1"; {" ".join(f"{n}={v}" for n, v in changed.items())} "$0" -c "$1"; true']
        done = subprocess.run([*command, sys.executable, again], env=environ, capture_output=True, text=True, timeout=50)
        return done.stdout.split()

    assert len(roots()) == 4
    assert len(set(roots())) == 1
    assert len(set(roots(PMIX_NAMESPACE="other@1"))) == 2


def test_a_lost_connection_to_hydra(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    assert not connection_lost({})
    assert not connection_lost({"PMI_FD": str(writer)})
    os.close(reader)
    os.close(writer)
    assert connection_lost({"PMI_FD": str(writer)})
    here, hydra = socket.socketpair()
    assert not connection_lost({"PMI_FD": str(here.fileno())})
    hydra.close()  # at the end of PMI_Finalize, of a process that ended normally
    assert connection_lost({"PMI_FD": str(here.fileno())})
    with open(tmp_path / "file", "w") as other:  # the number is another file's now
        assert connection_lost({"PMI_FD": str(other.fileno())})


# --- jobs ---

AT_NIGHT = [("two", "spawn", "mpicoll"), ("two", "fork", "torch"), ("one", "fork", "mpicoll"), ("parent", "fork", "torch")]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("case", "method", "api"),
    [
        ("two", "fork", "rpc"),
        ("one", "fork", "torch"),
        ("one", "spawn", "torch"),
        ("parent", "fork", "mpicoll"),
        ("sequence", "fork", "torch"),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in AT_NIGHT],
    ],
)
def test_a_job(case: str, method: str, api: str) -> None:
    if case == "one":
        done = launch(2, SCRIPT, case, method, api, timeout_s=120, fresh=True)
    else:  # Open MPI's mpiexec itself may never end if it ends a rank that is connecting to it
        done = run([sys.executable, "-m", "mpicoll.run", "-n", "2", SCRIPT, case, method, api], 120, fresh=True)
    said = done.stdout + done.stderr
    if method == "spawn" and not is_open_mpi():  # multiprocessing closes Hydra's connection
        assert done.returncode != 0, said
        assert "has no connection to mpiexec" in done.stderr, said
    elif case == "one":
        assert done.returncode == 0, said
        assert done.stdout.count("joined: 2 ranks") == 2, said
    else:
        assert done.returncode != 0, said
        assert "LaunchError: process" in done.stderr, said
        words = "before: one process is one rank" if case == "sequence" else "already: one process is one rank"
        assert words in done.stderr, said
    assert "Segmentation" not in said, said


STARTS_MPI_LATE = """
import mpi4py
mpi4py.rc.initialize = False
from mpicoll._mpi import library, runtime
library.MPI.Init_thread(library.MPI.THREAD_MULTIPLE)
runtime.start()
library.MPI.Finalize()
"""
NEXT = "from mpicoll._mpi.second_process import claim; print(f'refused: {claim.take()}')"


def test_a_second_program_in_a_rank() -> None:
    """After one that starts MPI itself, when mpicoll has loaded it. Open MPI sometimes let the ranks of the second one hang."""
    programs = f"{sys.executable} -c '{STARTS_MPI_LATE}' && {sys.executable} -c \"{NEXT}\""
    done = run([mpiexec(), "-n", "2", "sh", "-c", programs], env=LAUNCH_ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    words = r"refused: process \d+ was rank \d before" if is_open_mpi() else "refused: None"
    assert len(re.findall(words, done.stdout)) == 2, done.stdout
