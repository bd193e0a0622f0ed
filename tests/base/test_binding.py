"""Ranks that are bound to one core: what is set for them, and what the user is told."""

import pytest

from mpicoll._base import binding, cpus
from mpicoll._base.launcher import Launch
from tests.support import is_open_mpi, launch

OPEN_MPI = Launch("openmpi", 0, 2, 0, 2)
ONE, TWO = {3}, {3, 4}
CORES, SHARE = cpus.usable_cores(), cpus.usable_cores() // 2
needs_cores = pytest.mark.skipif(cpus.usable_cores() < 2, reason="each of 2 ranks needs a core of its own")


@pytest.fixture(autouse=True)
def _no_hardware_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_PLACES", "OMP_PROC_BIND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpus, "_core", str)  # each CPU is a core, whatever this machine has


@pytest.mark.parametrize("name", ["OMP_PLACES", "OMP_PROC_BIND"])
def test_a_binding_by_openmp_is_not_blamed_on_the_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libgomp binds the thread that loads it, which imports torch, and the threads that this one starts. Sites set these."""
    monkeypatch.setenv(name, "cores")
    text = binding.advice(OPEN_MPI, ONE, 8, waits_busily=False)
    assert text is not None
    assert text.startswith(f"OpenMP ({name}) has bound this rank to one core (CPU 3); its threads share that core")
    assert text.endswith(f"Use no {name}")


def test_what_the_user_has_set_stays() -> None:
    environ = {binding.YIELD_SETTING: "0"}
    binding.prepare(environ, ONE)
    assert environ == {binding.YIELD_SETTING: "0"}


@pytest.mark.parametrize(("neighbours", "expected"), [(6, {}), (7, {binding.YIELD_SETTING: "1"})])
def test_more_ranks_than_cores_on_this_host_give_their_cores_away(
    neighbours: int, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the host of mpirun has: `mpicoll.run` compared the ranks of a job with the cores of the login node."""
    monkeypatch.setattr(cpus, "allowed_for", lambda pid: set(range(6)))
    environ: dict[str, str] = {}
    binding.prepare(environ, set(range(6)), Launch("openmpi", 0, 64, 0, neighbours))
    assert environ == expected


@pytest.mark.parametrize(
    ("launched", "mask", "environ", "threads"),
    [
        (None, TWO, {}, None),
        (Launch("openmpi", 0, 1, 0, 1), TWO, {}, None),
        (Launch("openmpi", 0, 2, 0, 1), TWO, {}, None),  # one rank on each host
        (Launch("pmix", 0, 2, None, None), TWO, {}, None),
        (Launch("openmpi", 0, 4, 0, 2), set(range(8)), {}, 4),
        (Launch("openmpi", 0, 4, 0, 2), ONE, {}, 1),  # bound
        (Launch("openmpi", 0, 4, 0, 4), {0, 1, 2, 3}, {}, 2),  # each two of them bound to one half of the cores
        (Launch("openmpi", 0, 16, 0, 16), set(range(8)), {}, 1),
        (Launch("slurm", 0, 4, 0, 2), set(range(8)), {"SLURM_CPUS_ON_NODE": "4"}, 2),  # half of the node is the job's
        (Launch("slurm", 0, 4, 0, 2), set(range(8)), {"SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "3"}, 3),
        (Launch("hydra", 0, 4, 0, 2), set(range(8)), {"SLURM_CPUS_PER_TASK": "3"}, 3),
    ],
)
def test_a_ranks_share_of_the_cores_of_its_host(
    launched: Launch | None, mask: set[int], environ: dict[str, str], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpus, "allowed_for", lambda pid: set(range(8)))
    monkeypatch.setattr(cpus, "quota", lambda: None)
    assert binding.threads(environ, mask, launched) == threads


def test_the_quota_of_a_container_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "allowed_for", lambda pid: set(range(8)))
    monkeypatch.setattr(cpus, "quota", lambda: 4)
    assert binding.threads({}, set(range(8)), Launch("openmpi", 0, 2, 0, 2)) == 2


def test_hardware_threads_of_one_core_are_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "_core", lambda cpu: "3,4" if cpu in TWO else str(cpu))
    assert binding.is_bound(TWO)
    assert not binding.is_bound({4, 5})


@pytest.mark.parametrize(
    ("launched", "mask", "available", "waits_busily"),
    [
        (None, ONE, 8, True),  # by hand: there is nobody else
        (Launch("openmpi", 0, 1, 0, 1), ONE, 8, True),  # one rank sends nothing
        (OPEN_MPI, TWO, 8, True),
        (OPEN_MPI, ONE, 2, False),  # each core has its rank
        (OPEN_MPI, ONE, None, False),
        (Launch("pmix", 0, 2, None, None), ONE, 8, False),  # not known how many ranks are on this host
    ],
)
def test_nothing_to_say(launched: Launch | None, mask: set[int], available: int | None, waits_busily: bool) -> None:
    assert binding.advice(launched, mask, available, waits_busily) is None


@pytest.mark.parametrize(
    ("launcher", "remedy"),
    [("openmpi", "mpirun --bind-to none"), ("slurm", "srun --cpus-per-task=4"), ("hydra", "-bind-to none"), ("pals", "option")],
)
def test_cores_are_left_over(launcher: str, remedy: str) -> None:
    launched = Launch(launcher, 0, 2, 0, 2)
    text = binding.advice(launched, ONE, 8, waits_busily=False)
    assert text is not None
    assert f"{launcher} has bound this rank to one core (CPU 3)" in text
    assert "8 are there for 2 ranks" in text
    assert remedy in text


def test_cores_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "allowed_for", lambda pid: set(range(6)))
    assert binding.cores_for_ranks(OPEN_MPI, {}) == 6
    slurm = Launch("slurm", 0, 2, 0, 2)
    assert binding.cores_for_ranks(slurm, {"SLURM_CPUS_ON_NODE": "16"}) == 16
    assert binding.cores_for_ranks(slurm, {}) is None
    monkeypatch.setattr(cpus, "allowed_for", lambda pid: set())
    assert binding.cores_for_ranks(OPEN_MPI, {}) is None


@pytest.mark.launch
@needs_cores
@pytest.mark.parametrize(
    ("ranks", "prelude", "expected"),
    [
        pytest.param(2, "", (SHARE, str(SHARE)), id="shared"),
        pytest.param(2, "import torch; torch.set_num_threads(3)", (3, None), id="set_num_threads"),
        pytest.param(2, "os.environ['MKL_NUM_THREADS'] = '2'", (CORES, None), id="MKL_NUM_THREADS", marks=pytest.mark.slow),
        pytest.param(2, "os.environ['OMP_NUM_THREADS'] = '2'", (CORES, "2"), id="OMP_NUM_THREADS", marks=pytest.mark.slow),
        pytest.param(1, "", (CORES, None), id="one rank", marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_plain_mpiexec_share_the_cores(ranks: int, prelude: str, expected: tuple[int, str | None]) -> None:
    """As `mpicoll.run` does, and torchrun. Each rank computed with as many threads as there are cores.

    The local size is taken away: MKL, where torch has it, reads that of mpiexec (not that of srun), and divides the cores by it.
    """
    code = (
        "import os, sys\n"
        "for name in 'OMP_NUM_THREADS', 'OMPI_COMM_WORLD_LOCAL_SIZE', 'MPI_LOCALNRANKS': os.environ.pop(name, None)\n"
        f"import torch; {prelude or 'pass'}\n"
        "import mpicoll as dist; dist.init_process_group()\n"
        "dist.destroy_process_group(); dist.init_process_group()\n"
        "sys.stdout.write(f'{(torch.get_num_threads(), os.environ.get(\"OMP_NUM_THREADS\"))}\\n')\n"
    )
    done = launch(ranks, "-c", code, fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(expected)] * ranks
    assert done.stderr.count("set OMP_NUM_THREADS for another number") == (expected[1] == str(SHARE) and not prelude)


# What Open MPI itself says it does, by MPI's interface for tools.
YIELDS = """
import ctypes, sys
from mpicoll._base.probe import loaded_library
def yields():
    mpi, level, index, count, handle = ctypes.CDLL(loaded_library()), *(ctypes.c_int() for _ in range(3)), ctypes.c_void_p()
    assert mpi.MPI_T_init_thread(0, ctypes.byref(level)) == 0
    assert mpi.MPI_T_cvar_get_index(b"mpi_yield_when_idle", ctypes.byref(index)) == 0
    assert mpi.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) == 0
    value = ctypes.c_int(0)
    assert mpi.MPI_T_cvar_read(handle, ctypes.byref(value)) == 0
    return bool(value.value)
"""
SAY = "sys.stdout.write(f'bound {binding.is_bound(cpus.allowed())} yields {yields()}\\n')\n"
INIT = "import mpicoll as dist; dist.init_process_group()\nfrom mpicoll._base import cpus\nfrom mpicoll._base import binding\n"
on_open_mpi = pytest.mark.skipif(not is_open_mpi(), reason="MPICH gives its core away by itself, and its mpiexec binds nobody")


@pytest.mark.launch
@needs_cores
@on_open_mpi
@pytest.mark.parametrize("policy", ["core", "none"])
def test_under_mpirun(policy: str) -> None:
    """As plain mpirun binds two ranks. Open MPI gives the core away then, and only then.

    --map-by: replaces the environment's "slot:oversubscribe", with which Open MPI gives the core away as well."""
    code = "import os; os.environ.pop('OMPI_MCA_mpi_yield_when_idle', None)\n" + INIT + YIELDS + SAY
    done = launch(2, "-c", code, options=["--bind-to", policy, "--map-by", "core"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"bound {policy == 'core'} yields {policy == 'core'}\n") == 2, done.stdout


@pytest.mark.launch
@needs_cores
@on_open_mpi
@pytest.mark.parametrize("before", [False, True], ids=["mpicoll starts MPI", "the program starts MPI"])
def test_the_user_is_told_once(before: bool) -> None:
    code = (
        "import os; os.environ.pop('OMPI_MCA_mpi_yield_when_idle', None)\n"
        + ("from mpi4py import MPI\n" if before else "")
        + "from mpicoll._base import cpus; cpus.allowed_for = lambda pid: set(range(9))\n"
        + INIT
        + "dist.destroy_process_group(); dist.init_process_group()\n"
    )
    done = launch(2, "-c", code, options=["--bind-to", "core", "--map-by", "core"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("openmpi has bound this rank to one core") == 1, done.stderr
    assert "mpirun --bind-to none" in done.stderr
    assert ("20 ms" in done.stderr) is before
