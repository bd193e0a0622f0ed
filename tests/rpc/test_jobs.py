"""Jobs of their own: without a launcher, with workers that a program starts itself, that leave, and that do not answer."""

import re
import sys
from pathlib import Path

import pytest

from tests.launch import jobs
from tests.support import LAUNCH_ENVIRONMENT, is_open_mpi, launch, run
from tests.support.jobs import command

SCRIPTS = Path(__file__).parent / "scripts"
TRAINED = "4.0, then [0.5, 0.5]"
HUNG_S = 60  # seconds; 10 on two free cores

pytestmark = [pytest.mark.launch, pytest.mark.timeout(HUNG_S + 30)]


@pytest.mark.parametrize(
    ("arguments", "ranks"), [("world_size=4", 4), ("world_size=4, rank=1", 4), ("rank=2", 3)], ids=["size", "both", "rank"]
)
def test_several_workers_without_a_launcher(arguments: str, ranks: int) -> None:
    code = f"from mpicoll import rpc; rpc.init_rpc('worker', {arguments})"
    done = run([sys.executable, "-c", code], env=dict(LAUNCH_ENVIRONMENT))
    assert done.returncode == 1
    assert f"LaunchError: init_rpc: {arguments.split(',')[0]} asks for {ranks} ranks, but no MPI launcher" in done.stderr
    assert f"python -m mpicoll.run -n {ranks} script.py" in done.stderr


def test_one_worker_without_a_launcher() -> None:
    code = "from mpicoll import rpc; rpc.init_rpc('me', rank=0); print(rpc.rpc_sync('me', abs, (-3,))); rpc.shutdown()"
    done = run([sys.executable, "-c", code], env=dict(LAUNCH_ENVIRONMENT))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3", "")


SOME = """
from mpicoll import rpc
from mpicoll._base import launcher
if launcher.detect().rank == 0:
    rpc.init_rpc("me", rank=0, world_size=1)
"""


def test_a_world_of_one_is_refused_before_mpi_starts(tmp_path: Path) -> None:
    """It waited in MPI_Init for the other ranks, which end without MPI."""
    done = jobs.run(tmp_path, "-n", "2", "-c", SOME, OMP_NUM_THREADS="1")
    assert done.returncode != 0
    remedy = r"Leave out rank and world_size: .* call init_process_group\(\"mpi\"\) on all ranks before"
    assert re.search(rf"LaunchError: init_rpc: world_size=1, but MPI says 2\. {remedy}", done.stderr), done.stderr


def test_a_program_spawns_workers_twice() -> None:
    """As PyTorch's examples for RPC do, by mp.spawn."""
    script = str(SCRIPTS / "spawned_workers.py")
    done = run([sys.executable, script, "rounds"], timeout_s=HUNG_S, env=LAUNCH_ENVIRONMENT)
    assert done.stdout.splitlines() == [f"first: {TRAINED}", f"second: {TRAINED}"], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("by", [pytest.param("mpirun", marks=pytest.mark.slow), "mpicoll.run"])
def test_a_child_of_each_rank_is_the_worker(by: str) -> None:
    """With MPICH the start method closes the child's connection to mpiexec, and the child says so."""
    done = run(command(by, str(SCRIPTS / "spawned_workers.py"), "children"), timeout_s=HUNG_S, env=LAUNCH_ENVIRONMENT)
    if is_open_mpi():
        assert f"child: {TRAINED}" in done.stdout, done.stdout + done.stderr
        assert done.returncode == 0, done.stderr
    else:
        assert "by multiprocessing's method 'spawn', that closed it" in done.stderr, done.stdout + done.stderr
        assert done.returncode == 1, done.stderr


def test_a_forked_child_ends_nothing() -> None:
    """Its exit told the other workers that this one has left, over the connections of its parent."""
    done = launch(2, str(SCRIPTS / "forked.py"), timeout_s=HUNG_S)
    assert sorted(done.stdout.splitlines()) == ["child: 7", "worker0: 3", "worker1: 3"], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["exits", "killed"])
def test_the_others_go_on(how: str) -> None:
    """When a worker goes without shutdown, calls to it fail, those under way and later ones. Others are still called, and end."""
    if how == "killed" and not is_open_mpi():
        pytest.skip("MPICH's launcher ends the job of a process that is killed")
    options = ["--with-ft", "ulfm"] if how == "killed" else []
    done = launch(3, "tests/rpc/scripts/leaving.py", how, timeout_s=HUNG_S, options=options)
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    assert "learned: worker 'pupil' (rank 1) has left before it answered go" in done.stdout, said
    assert "afterwards: worker 'pupil' (rank 1) has left" in done.stdout, said
    assert "Traceback" not in done.stderr, said
    assert "there and back: other2" in done.stdout, said
    assert "other2: through its shutdown" in done.stdout, said


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_job_ends(how: str) -> None:
    """Nobody who waits is left waiting. An exception is shown with its traceback and rank, as everywhere in mpicoll."""
    done = launch(2, "tests/rpc/scripts/leaving.py", how, timeout_s=HUNG_S)
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode != 0, said
    if how == "raises":
        assert "LookupError: the pupil is lost" in done.stderr, said
        assert "mpicoll: rank 1 of 2" in done.stderr, said


CALLS = {
    "rpc_sync": "nap",
    "rpc_async": "nap",
    "remote": "RRef.to_here",
    "creation": "nap",
    "method": "nap of an RRef",
    "remote method": "nap of an RRef",
}


@pytest.mark.parametrize(("how", "state"), [("busy", "runs"), ("stopped", r"is stopped \(SIGSTOP\)")])
def test_a_call_that_expires(how: str, state: str) -> None:
    """It names the function, the worker, its host, the time, and the state of its process."""
    done = launch(2, "tests/rpc/scripts/waiting.py", how, timeout_s=HUNG_S)
    for call, function in CALLS.items():
        prefix = r"CallTimedOut: RPC ran for more than set timeout \(500 ms\) and will now be marked with an error: "
        said = rf"{function} on worker 'slow' \(rank 1\): no answer within 0.5 s; its process \d+ on host \S+ {state}"
        assert re.search(rf"^{call}: {prefix}{said}$", done.stdout, re.MULTILINE), f"{call}: {done.stdout}{done.stderr}"
    if how == "stopped":
        missing = (
            rf"not every worker has come to its shutdown within 0.5 s: 'slow' \(rank 1\), its process \d+ on host \S+ {state}"
        )
        assert re.search(missing, done.stdout), done.stdout
    else:
        assert done.returncode == 0, done.stderr
