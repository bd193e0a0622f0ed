"""Unmodified torch scripts under plain mpirun and under mpicoll.run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import LAUNCH_ENVIRONMENT, run
from tests.support.jobs import OVER_MPI, command

SCRIPTS = Path(__file__).parent / "scripts"
HUNG_S = 40  # seconds; a script of these takes 2 to 8

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]


def by(launcher: str) -> pytest.MarkDecorator:
    """By this launcher always, by the others on request."""
    others = [pytest.param(other, marks=pytest.mark.slow) for other in OVER_MPI if other != launcher]
    return pytest.mark.parametrize("by", [launcher, *others])


def start(by: str, ranks: int, script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run(command(by, str(SCRIPTS / script), *arguments, ranks=ranks), timeout_s=HUNG_S, env={**LAUNCH_ENVIRONMENT, **env})


def succeeded(done: subprocess.CompletedProcess[str], ranks: int, words: str) -> None:
    said = f"{done.args}\nstatus {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: {words}" in done.stdout, said
    assert "Traceback" not in done.stderr, said


TRAINED = [("mpirun", "mpi"), ("mpicoll.run", "gloo")]
TRAINED += [pytest.param(*other, marks=pytest.mark.slow) for other in (("mpicoll.run", "mpi"), ("mpirun", "gloo"))]


@pytest.mark.parametrize(("by", "backend"), TRAINED)
def test_ddp(by: str, backend: str) -> None:
    """torchcomms, which a variable puts in the place of torch's own groups, leaves "mpi" alone."""
    arguments, env = (["gloo"], {}) if backend == "gloo" else ([], {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1"})
    succeeded(start(by, 2, "train_ddp.py", *arguments, **env), 2, f"trained with {backend}")


@by("mpirun")
def test_written_for_torchrun(by: str) -> None:
    done = start(by, 2, "torchrun_style.py")
    succeeded(done, 2, "local")
    assert "local 0 of 2" in done.stdout
    assert "local 1 of 2" in done.stdout


@pytest.mark.parametrize("by", OVER_MPI)
def test_a_failing_rank_ends_the_job(by: str) -> None:
    """trap 56: torch's prefix once, our last words, and nobody waits."""
    began = time.monotonic()
    done = start(by, 2, "one_rank_fails.py")
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode != 0, said
    assert "[rank1]: ValueError: this rank has had enough" in done.stderr, said
    assert "[rank1]: [rank1]" not in done.stderr, said
    assert "rank 1 of 2" in done.stderr, said
    assert time.monotonic() - began < HUNG_S - 5, said


def test_alone_without_a_launcher() -> None:
    succeeded(
        run([sys.executable, str(SCRIPTS / "train_ddp.py")], timeout_s=HUNG_S, env=LAUNCH_ENVIRONMENT), 1, "trained with mpi"
    )
