"""Programs of other packages train on two ranks over MPI as they do over Gloo: equal losses, weights and metrics.

Each program in scripts/ runs under mpirun and ``python -m mpicoll.run`` with the backend mpi, and once under torchrun with
Gloo. None of them imports mpicoll.
"""

from pathlib import Path

import pytest

from tests.support.jobs import OVER_MPI, attempt, command, same_training, trained

SCRIPTS = Path(__file__).parent / "scripts"
HUNG_S = 100  # seconds; a job imports large packages, which takes 10 to 30 on two cores

# Name: the script, and its arguments for MPI and for Gloo. {folder} is an empty folder.
PROGRAMS = {
    "transformers": ("trainer.py", ["{folder}"], ["{folder}"]),
    "lightning": ("lightning_ddp.py", ["mpi"], ["ddp"]),
    "torchmetrics": ("torchmetrics_train.py", ["mpi"], ["gloo"]),
    "ignite": ("ignite_train.py", ["mpi"], ["gloo"]),
    "mpi4py": ("mpi4py_beside.py", ["mpi"], ["gloo", "alone"]),
    "optuna": ("optuna_study.py", ["mpi"], ["gloo"]),
}

pytestmark = [pytest.mark.companion, pytest.mark.launch, pytest.mark.timeout(2 * HUNG_S + 20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("written")


@pytest.mark.parametrize("by", OVER_MPI)
@pytest.mark.parametrize("name", PROGRAMS)
def test_trains_as_over_gloo(name: str, by: str, folder: Path) -> None:
    script, over_mpi, over_gloo = PROGRAMS[name]
    path = str(SCRIPTS / script)
    expected = trained("torchrun", path, *(word.format(folder=folder) for word in over_gloo), timeout_s=HUNG_S)
    assert expected[0]["backend"] == "gloo"
    found = trained(by, path, *(word.format(folder=folder) for word in over_mpi), timeout_s=HUNG_S)
    same_training(found, expected, "mpi")


@pytest.mark.parametrize("by", OVER_MPI)
def test_a_package_that_names_gloo(by: str, folder: Path) -> None:
    """MPICOLL_REPLACE_GLOO=1; Gloo could not make a group, since there is no such interface."""
    script = str(SCRIPTS / "megatron_groups.py")
    expected = trained("torchrun", script, "gloo", str(folder / "gloo"), timeout_s=HUNG_S)
    env = (("MPICOLL_REPLACE_GLOO", "1"), ("GLOO_SOCKET_IFNAME", "none"))
    found = trained(by, script, "mpi", str(folder / by), timeout_s=HUNG_S, env=env)
    same_training(found, expected, "mpi")
    assert found[0]["named_gloo"] == 1


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_the_default_backend_of_the_job(backend: str) -> None:
    """``mpicoll run --backend mpi`` sets this variable; Lightning's strategy "ddp" reads torch's table of default backends."""
    script = str(SCRIPTS / "lightning_ddp.py")
    expected = trained("torchrun", script, "ddp", timeout_s=HUNG_S)
    env = (("MPICOLL_BACKEND", "mpi"),) if backend == "mpi" else ()
    same_training(trained("mpirun", script, "ddp", timeout_s=HUNG_S, env=env), expected, backend)


@pytest.mark.parametrize(("use_cpu", "size"), [("0", 1), ("1", 2)])
def test_accelerate_takes_mpi_where_a_variable_says_to_use_cpus(use_cpu: str, size: int) -> None:
    """Without it, and without GPUs, each rank is a job of one."""
    program = "import sys; from accelerate import Accelerator; sys.stdout.write(f'one of {Accelerator().num_processes}\\n')"
    done = attempt(command("mpirun", "-c", program), HUNG_S, ACCELERATE_USE_CPU=use_cpu, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"one of {size}\n") == 2, done.stdout
