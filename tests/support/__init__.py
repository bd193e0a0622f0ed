"""What every test may use: ``agree`` and ``everyone`` among the ranks of this session, ``launch`` for another job."""

import functools
import inspect
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed
from mpi4py import MPI

from mpicoll import testing
from mpicoll._base.cpus import longer
from mpicoll._base.torch_variables import TORCH_VARIABLES
from mpicoll.testing import agree as agree
from mpicoll.testing import everyone as everyone
from mpicoll.testing._session import Session
from tests.support import warm

# torch 2.11 and 2.12 have no sort_ranks: new_group always sorts there.
needs_sort_ranks = pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(torch.distributed.new_group).parameters,
    reason=f"torch {torch.__version__} has no new_group(sort_ranks=...)",
)

ROOT = Path(__file__).resolve().parent.parent.parent
WARM_RANKS = str(Path(__file__).resolve().parent / "warm_ranks")

# What Open MPI needs as root, with more ranks than cores, on one host; other MPIs do not read it.
LAUNCH_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",  # without "slot" all ranks are on the first of several hosts
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "^ofi",
    "OMP_NUM_THREADS": "1",
}

NEVER_BEGAN = "The PMIx server's listener thread failed to start"  # Open MPI 5.0.11

# What a launcher leaves in the environment; a job started from inside another must not inherit it.
LAUNCHER_PREFIXES = ("_MPICOLL_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "PMI2_", "HYDRA_", "HYDI_", "MPI_LOCAL", "SLURM_", "PALS_")


def session() -> Session:
    """This rank's session of the plugin, which tests/conftest.py starts on one rank, too."""
    found: Session = testing.sessions[0]
    return found


def eventually(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> bool:
    """Whether ``condition`` becomes true within 20 s. Drives no MPI. meanwhile: called between two attempts."""
    deadline = time.monotonic() + longer(20)
    while not (fulfilled := condition()) and time.monotonic() < deadline:
        meanwhile()
        time.sleep(0.005)
    return bool(fulfilled)


def raised_by(call: Callable[[], object]) -> Exception | None:
    """The exception of ``call``, for a test that must go on with the other ranks before it looks at it."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  the test looks at it
        return error
    return None


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what a launcher put there, and with the checkout importable."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in TORCH_VARIABLES
    }
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, **extra}


def mpiexec() -> str:
    """The mpiexec that stands beside this Python, else the one on the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    assert found is not None, "no mpiexec beside this Python nor on the PATH"
    return found


def free_port() -> int:
    """A TCP port of this host that no process has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open_mpi() -> bool:
    return MPI.get_vendor()[0] == "Open MPI"


def run(
    command: list[str],
    timeout_s: float = 45,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs ``command`` outside this session's MPI job and returns status, stdout and stderr.

    env: added to ``clean_environment()``. fresh: ranks of ``mpicoll.run`` start as those of users do; otherwise they are forked
    from a process that has imported torch (warm.py), unless another program starts mpicoll.run: it may do so on another host or
    in a container, whose processes that server cannot make. Fails the test after timeout_s (longer on a busy machine), with what
    was printed up to then; the command gets SIGTERM first, so that an mpiexec ends its ranks.
    """
    environ = clean_environment(**(env or {}))
    if not fresh and command[0] == sys.executable and "mpicoll.run" in command:
        environ |= {warm.ADDRESS: warm_server(), "PYTHONPATH": f"{WARM_RANKS}{os.pathsep}{environ['PYTHONPATH']}"}
    done = _run_once(command, timeout_s, cwd, environ)
    if done.returncode and NEVER_BEGAN in done.stderr:  # once in some hundred jobs on a busy machine, before any rank is there
        done = _run_once(command, timeout_s, cwd, environ)
    return done


def _run_once(command: list[str], timeout_s: float, cwd: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    timeout_s = longer(timeout_s)
    process = subprocess.Popen(
        command, cwd=cwd, env=environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        pytest.fail(f"no end after {timeout_s:g} s: {command}\nstdout:\n{out}\nstderr:\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def launch(
    ranks: int,
    *arguments: str,
    timeout_s: float = 45,
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """``mpiexec options... -n ranks python arguments...``, by plain mpiexec, not by mpicoll.run. For tests marked ``launch``.

    The ranks are forked from a process that has imported torch (warm.py), unless the test is about how a process starts
    (``fresh``) or ``env`` has settings that torch reads at its import.
    """
    environ = {**LAUNCH_ENVIRONMENT, **(env or {})}
    python = [sys.executable]
    if not fresh and not warm.read_at_import(env or {}):
        python = [sys.executable, "-SE", warm.__file__]
        environ[warm.ADDRESS] = warm_server()
    return run([mpiexec(), *options, "-n", str(ranks), *python, *arguments], timeout_s, cwd, environ)


@functools.cache
def warm_server() -> str:
    """The address of this session's server of warm processes; started by the first test that needs it.

    Workers of pytest-xdist use the one that the session has started for all of them (tests/conftest.py).
    """
    return os.environ.get(warm.ADDRESS) or warm.server(clean_environment(**LAUNCH_ENVIRONMENT))
