"""A container for each rank, as `mpiexec -n 2 docker run ...` makes it: made of namespaces, without a container engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import LAUNCH_ENVIRONMENT, is_open_mpi, mpiexec, run

SCRIPT = str(Path(__file__).parent / "scripts" / "containers.py")
OWN_MEMORY = ["sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
OWN = {
    "/dev/shm": ["unshare", "--mount", *OWN_MEMORY],
    "process numbers": ["unshare", "--pid", "--fork", "--mount-proc"],
    "both": ["unshare", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", *OWN_MEMORY],
}


def missing() -> str | None:
    """Why there can be no such containers here; None if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    try:
        tried = subprocess.run([*OWN["both"], "true"], capture_output=True, text=True, timeout=20)
    except FileNotFoundError:
        return "no unshare here"
    return None if tried.returncode == 0 else f"this machine allows no such namespaces: {tried.stderr.strip()}"


REASON = missing()
pytestmark = [pytest.mark.launch, pytest.mark.timeout(120), pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.mark.parametrize("own", [pytest.param(own, marks=pytest.mark.slow) if own != "both" else own for own in OWN])
def test_ranks_in_containers_of_their_own(own: str) -> None:
    """Before: a crash (Open MPI) or a hang (MPICH); see Note [A container for each rank] in _discovery/containers.py."""
    done = run([mpiexec(), "-n", "2", *OWN[own], sys.executable, SCRIPT], 60, env=LAUNCH_ENVIRONMENT)
    assert (done.returncode, done.stdout.split()) == (0, ["right"]), done.stdout + done.stderr
    assert "shared memory initialization" not in done.stderr  # Open MPI's warning


@pytest.mark.skipif(is_open_mpi(), reason="an option of MPICH")
def test_a_container_that_reaches_mpiexec_by_a_port() -> None:
    """It gets no open file of mpiexec. Before: a hang, since the rank is not known before MPI starts."""
    done = run([mpiexec(), "-pmi-port", "-n", "2", *OWN["both"], sys.executable, SCRIPT], 60, env=LAUNCH_ENVIRONMENT)
    assert (done.returncode, done.stdout.split()) == (0, ["right"]), done.stdout + done.stderr


@pytest.mark.slow
def test_the_doctor_explains_it() -> None:
    command = [mpiexec(), "-n", "2", *OWN["both"], sys.executable, "-m", "mpicoll.doctor"]
    done = run(command, 90, env=LAUNCH_ENVIRONMENT)
    assert "in a container with process numbers of its own" in done.stdout, done.stdout + done.stderr
    assert "--ipc=host --pid=host" in done.stdout


@pytest.mark.slow
def test_one_container_for_all_ranks_keeps_shared_memory() -> None:
    """Its launcher runs inside, so that nothing is missing."""
    environ = {**LAUNCH_ENVIRONMENT, "MPICOLL_LOG": "info"}
    done = run([*OWN["both"], mpiexec(), "-n", "2", sys.executable, SCRIPT], 60, env=environ)
    assert (done.returncode, done.stdout.split()) == (0, ["right"]), done.stdout + done.stderr
    assert "2 ranks on 1 node" in done.stderr


def test_a_shared_namespace_keeps_shared_memory() -> None:
    """docker --ipc=host --pid=host, and Apptainer: another file tree (mount namespace) only."""
    code = "import mpicoll, os; mpicoll.init_process_group(); assert 'MPIR_CVAR_NOLOCAL' not in os.environ"
    done = run([mpiexec(), "-n", "2", "unshare", "--mount", sys.executable, "-c", code], 60, env=LAUNCH_ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not is_open_mpi(), reason="about a setting of Open MPI")
def test_transports_that_the_user_names_stay() -> None:
    environ = {**LAUNCH_ENVIRONMENT, "OMPI_MCA_btl": "self,tcp"}
    done = run([mpiexec(), "-n", "2", *OWN["both"], sys.executable, SCRIPT], 60, env=environ)
    assert (done.returncode, done.stdout.split()) == (0, ["right"]), done.stdout + done.stderr
