"""Jobs of a real Slurm on two hosts of network namespaces (tests/support/slurm.py)."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpicoll._base import cpus
from tests.cluster import where
from tests.support import LAUNCH_ENVIRONMENT, ROOT, mpiexec, slurm

REASON = slurm.missing()
pytestmark = [
    pytest.mark.launch,
    pytest.mark.timeout(150),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

RUN = (sys.executable, "-m", "mpicoll.run")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Slurm]:
    with slurm.slurm(2, tmp_path_factory.mktemp("slurm")) as up:
        yield up


@pytest.fixture
def nodes(cluster: slurm.Slurm) -> Iterator[slurm.Slurm]:
    """A Slurm without jobs."""
    yield cluster
    cluster.cancel_all()


def test_srun_starts_the_ranks(nodes: slurm.Slurm, tmp_path: Path) -> None:
    """Every variable is there as soon as torch is imported."""
    done = nodes.run("srun", "-K", f"--mpi={nodes.pmi}", "-N", "2", "-n", "4", sys.executable, where.SCRIPT, cwd=tmp_path)
    assert set(where.check(done, "mpihost1")) == {"mpihost1", "mpihost2"}
    assert all(said["before"] == said["after"] for said in where.ranks(done))


def test_ranks_of_a_plain_srun_use_the_cores_of_their_tasks(nodes: slurm.Slurm, tmp_path: Path) -> None:
    unset = ("env", "-u", "OMP_NUM_THREADS", "-u", "MKL_NUM_THREADS")
    tasks = ("-N", "2", "--ntasks-per-node=2", "--cpus-per-task=3")
    done = nodes.run("srun", "-K", f"--mpi={nodes.pmi}", *tasks, *unset, sys.executable, where.SCRIPT, cwd=tmp_path)
    assert [said["threads"] for said in where.ranks(done)] == [max(1, min(3, cpus.usable_cores() // 2))] * 4


def test_mpicoll_run_reads_the_allocation(nodes: slurm.Slurm, tmp_path: Path) -> None:
    done = nodes.run("salloc", "-Q", "-N", "2", "-n", "4", *RUN, where.SCRIPT, cwd=tmp_path)
    assert sorted(where.check(done, "mpihost1")) == ["mpihost1"] * 3 + ["mpihost2"]
    assert "4 ranks: the tasks of Slurm job" in done.stderr


def test_mpiexec_reads_the_allocation(nodes: slurm.Slurm, tmp_path: Path) -> None:
    """Without `mpicoll run`. The settings are those that root and more ranks than cores need."""
    words = ("salloc", "-Q", "-N", "2", "-n", "4", mpiexec(), "-n", "4", sys.executable, where.SCRIPT)
    done = nodes.run(*words, cwd=tmp_path, **LAUNCH_ENVIRONMENT)
    assert sorted(where.check(done, "mpihost1")) == ["mpihost1"] * 3 + ["mpihost2"]


def test_some_nodes_of_the_allocation(nodes: slurm.Slurm, tmp_path: Path) -> None:
    done = nodes.run("salloc", "-Q", "-N", "2", "-n", "4", *RUN, "--nnodes", "1", "-n", "2", where.SCRIPT, cwd=tmp_path)
    assert where.check(done, "localhost") == ["mpihost1"] * 2


def test_a_task_that_leaves_early_ends_the_step(nodes: slurm.Slurm, tmp_path: Path) -> None:
    """It has not imported mpicoll yet: srun -K must end the others, which wait for it in MPI."""
    command = ("srun", "-K", f"--mpi={nodes.pmi}", "-N", "2", "-n", "2", sys.executable, where.SCRIPT, "leave")
    done = nodes.run(*command, cwd=tmp_path)
    assert done.returncode != 0, done.stderr
    assert "Exited with exit code 3" in done.stderr
    assert "WHERE" not in done.stdout


def test_a_rank_that_leaves_early_is_named(nodes: slurm.Slurm, tmp_path: Path) -> None:
    done = nodes.run("salloc", "-Q", "-N", "2", "-n", "2", *RUN, where.SCRIPT, "leave", cwd=tmp_path)
    assert done.returncode != 0, done.stderr
    assert "mpicoll.run: rank 1 of 2 on mpihost2: exit status 3" in done.stderr
    assert "WHERE" not in done.stdout


@pytest.mark.parametrize("option", ["--kill-on-bad-exit=0", "--kill-on-bad-exit=1"])
def test_mpicoll_run_is_started_once(option: str, nodes: slurm.Slurm, tmp_path: Path) -> None:
    """(Each of the tasks started a job of its own.)"""
    (tmp_path / "job.py").write_text("import pathlib; pathlib.Path('started').touch()")
    done = nodes.run("srun", option, "-N", "2", "-n", "4", *RUN, "-n", "2", "job.py", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("mpicoll.run: this is rank 0 of 4 of srun") == 1, done.stderr
    assert not (tmp_path / "started").exists()


def test_mpicoll_run_is_the_only_task(nodes: slurm.Slurm, tmp_path: Path) -> None:
    """``srun -n 1`` in a job, or ``srun --pty bash``: no mistake, also where srun's PMIx is not for this MPI."""
    done = nodes.run("srun", "--mpi=pmix", "-N", "1", "-n", "1", *RUN, "-n", "2", where.SCRIPT, cwd=tmp_path)
    assert [said["host"] for said in where.ranks(done)] == ["mpihost1"] * 2


# --- scripts of the pages, which name 64 nodes, and a job that saves before its time limit ---


def submitted(nodes: slurm.Slurm, folder: Path, *words: str, **environ: str) -> tuple[str, Callable[[], str]]:
    """The number of a job on two nodes, and what tells what it has printed."""
    options = ("--parsable", "--ntasks-per-node=1", "--time=10", "--output=output")
    done = nodes.run("sbatch", *options, *words, cwd=folder, **environ)
    assert done.returncode == 0, done.stderr
    output = folder / "output"
    return done.stdout.strip(), lambda: output.read_text() if output.exists() else ""


def test_the_script_with_srun(nodes: slurm.Slurm, tmp_path: Path) -> None:
    """examples/clusters/train.sbatch: options of the command line make it small, and its lines stay as they are."""
    shutil.copy(ROOT / "examples" / "clusters" / "train.sbatch", tmp_path)
    shutil.copy(where.SCRIPT, tmp_path / "train.py")
    small = ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2")
    _, said = submitted(nodes, tmp_path, *small, "train.sbatch", MPI_TYPE=nodes.pmi, OMP_PROC_BIND="close")
    slurm.wait_for(lambda: not nodes.queue(), "the job goes on", said)
    done = subprocess.CompletedProcess("train.sbatch", 0, said(), said())
    assert where.check(done, "mpihost1") == ["mpihost1"] * 2 + ["mpihost2"] * 2
    assert [rank["threads"] for rank in where.ranks(done)] == [2] * 4


def test_the_example_goes_on_after_the_time_limit(nodes: slurm.Slurm, tmp_path: Path) -> None:
    """examples/slurm: USR1, a checkpoint, back into the queue, and on from there."""
    for file in (ROOT / "examples" / "slurm").iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    steps = 150
    job, said = submitted(nodes, tmp_path, "submit.sbatch", "--steps", str(steps), "--pause", "0.05")

    def shown() -> str:
        return nodes.run("scontrol", "show", "job", job, cwd=tmp_path).stdout

    slurm.wait_for(lambda: "2 ranks begin after step 0" in said(), "no ranks", said)
    assert nodes.run("scancel", "--signal=USR1", "--batch", job, cwd=tmp_path).returncode == 0
    slurm.wait_for(lambda: "Restarts=1" in shown() and "JobState=PENDING" in shown(), "not in the queue again", said)
    assert not (tmp_path / "checkpoints" / "finished").exists()
    # Slurm would wait for two minutes. A node refuses a job that begins in the second in which it was ended there.
    nodes.run("scontrol", "update", f"JobId={job}", "StartTime=now+2", cwd=tmp_path)
    last = f"saved after step {steps} of {steps}"
    slurm.wait_for(lambda: last in said(), "not finished", lambda: said() + shown())
    slurm.wait_for(lambda: not nodes.queue(), "the job goes on", said)
    assert (tmp_path / "checkpoints" / "finished").exists()
    stopped = [int(step) for step in re.findall(r"saved after step (\d+)", said())]
    assert len(stopped) == 2, said()
    assert 0 < stopped[0] < steps
    assert f"2 ranks begin after step {stopped[0]}\n" in said()
