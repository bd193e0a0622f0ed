"""A container for each rank, as `mpiexec -n 2 docker run ...` makes it: made of namespaces, without a container engine."""

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


open_mpi = pytest.mark.skipif(not is_open_mpi(), reason="about a setting of Open MPI")
mpich = pytest.mark.skipif(is_open_mpi(), reason="an option of MPICH")


@pytest.mark.parametrize(
    ("own", "options", "environ"),
    [
        ("both", [], {}),
        pytest.param("/dev/shm", [], {}, marks=pytest.mark.slow),
        pytest.param("process numbers", [], {}, marks=pytest.mark.slow),
        # The user names the transports: they stay.
        pytest.param("both", [], {"OMPI_MCA_btl": "self,tcp"}, marks=[pytest.mark.slow, open_mpi]),
        # A container that gets no open file of mpiexec. Before: a hang, since the rank is not known before MPI starts.
        pytest.param("both", ["-pmi-port"], {}, marks=mpich),
    ],
)
def test_ranks_in_containers_of_their_own(own: str, options: list[str], environ: dict[str, str]) -> None:
    """Before: a crash (Open MPI) or a hang (MPICH); see Note [A container for each rank] in _base/containers.py."""
    command = [mpiexec(), *options, "-n", "2", *OWN[own], sys.executable, SCRIPT]
    done = run(command, 60, env={**LAUNCH_ENVIRONMENT, **environ})
    assert (done.returncode, done.stdout.split()) == (0, ["right"]), done.stdout + done.stderr
    assert "shared memory initialization" not in done.stderr  # Open MPI's warning


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
