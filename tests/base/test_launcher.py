"""Which launcher started a process, from environments as the launchers really set them (traps 76-80)."""

from typing import Any

import pytest

from mpicoll._base import inherited, open_mpi_settings
from mpicoll._base.inherited import ADDED, OWNER, provide_here, without_job
from mpicoll._base.launcher import Launch, detect, started_by_mpi
from mpicoll._base.slurm import expand_hosts, first_host, tasks_per_node
from mpicoll._base.torch_variables import PROVIDED, TORCH_VARIABLES, provide, provide_node_rank

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_RANK": "5", "PMIX_NAMESPACE": "prterun-node1-4582@1",
    "OMPI_MCA_btl": "^ofi", "OMPI_MCA_initial_wdir": "/tmp", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PRTE_LAUNCHED": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none", "PMIX_SERVER_URI41": "prterun-vm-4592@0.0;tcp4://127.0.0.1:39569",
}  # fmt: skip
HYDRA = {
    "PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    "HYDI_CONTROL_FD": "7", "HYDRA_LAUNCHER": "ssh",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "6", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "2", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}  # fmt: skip
SBATCH = {
    "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
PALS = {
    "PALS_RANKID": "3",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "2",
    "PALS_APID": "u-1",
}
FLUX = {
    "FLUX_JOB_ID": "f2kXQ", "FLUX_URI": "local:///run/flux/local", "FLUX_JOB_SIZE": "8", "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "5", "FLUX_TASK_LOCAL_ID": "1", "PMI_FD": "7", "PMI_RANK": "5", "PMI_SIZE": "8",
}  # fmt: skip
JSM = {f"JSM_NAMESPACE_{name}": n for name, n in (("RANK", "5"), ("SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "4"))}
FUJITSU = {"PMIX_RANK": "5", "OMPI_MCA_orte_ess_vpid": "5", "PLE_RANK_ON_NODE": "1"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": n for name, n in (("RANK", "1"), ("SIZE", "4"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, None),
        (OPENMPI, Launch("openmpi", 5, 8, 1, 4)),
        (HYDRA, Launch("hydra", 1, 2, 1, 2)),
        (SRUN, Launch("slurm", 6, 7, 2, 3)),
        (PALS, Launch("pals", 3, 4, 1, 2)),
        ({**PALS, "PMIX_RANK": "3", "PMIX_NAMESPACE": "u-1"}, Launch("pals", 3, 4, 1, 2)),  # mpiexec --pmi=pmix
        (FLUX, Launch("flux", 5, 8, 1, None)),
        ({**FLUX, "FLUX_JOB_NNODES": "1"}, Launch("flux", 5, 8, 1, 8)),
        ({**FLUX, **HYDRA}, Launch("hydra", 1, 2, 1, 2)),  # mpiexec in a task of flux
        ({"FLUX_URI": FLUX["FLUX_URI"], "FLUX_ENCLOSING_ID": "f2kXQ"}, None),  # the script of `flux batch`
        ({name: n for name, n in PALS.items() if name != "PMI_SIZE"}, None),  # how many ranks there are is MPI's to say
        (JSM, Launch("jsm", 5, 8, 1, 4)),
        ({**JSM, **OPENMPI}, Launch("openmpi", 5, 8, 1, 4)),  # jsrun with Spectrum MPI sets both
        ({**JSM, "PMIX_RANK": "5", "PMIX_NAMESPACE": "2"}, Launch("jsm", 5, 8, 1, 4)),
        (FUJITSU, None),  # nothing that is known to name the size
        (MVAPICH, Launch("mvapich", 1, 4, 1, 2)),
        ({"PMIX_RANK": "1", "PMIX_SIZE": "3"}, Launch("pmix", 1, 3, None, None)),
        # srun --mpi=pmix: PMIx names the rank, Slurm the size
        ({**SRUN, "PMIX_RANK": "6", "PMIX_NAMESPACE": "slurm.pmix.77.0"}, Launch("slurm", 6, 7, 2, 3)),
        # srun --mpi=pmi2 is Slurm, not Hydra: error texts name the launcher
        ({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7"}, Launch("slurm", 6, 7, 2, 3)),
        # mpirun inside an allocation: SLURM_PROCID is that of the batch shell, or of the daemon
        ({**SBATCH, **OPENMPI}, Launch("openmpi", 5, 8, 1, 4)),
        ({**SRUN, **HYDRA}, Launch("hydra", 1, 2, 1, 2)),
        # a batch script's own shell has SLURM_PROCID=0 and SLURM_NTASKS=8, and is no task
        (SBATCH, None),
        ({**SBATCH, "SLURM_STEP_ID": "4294967291"}, None),
        # torchrun is no MPI launcher
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, None),
        # nonsense is not an answer, and no exception either: this runs at `import torch`
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"PMI_RANK": "0"}, None),
        ({"PMIX_RANK": "0"}, None),
    ],
)
def test_detect(environ: dict[str, str], launch: Launch | None) -> None:
    assert detect(environ) == launch


def test_torch_variables_are_provided_once_and_for_ranks_only() -> None:
    environ = dict(HYDRA)
    provide(environ)
    once, batch = dict(environ), dict(SBATCH)
    provide(environ)
    provide(batch)
    assert (environ, batch) == (once, SBATCH)
    assert {name: environ[name] for name in TORCH_VARIABLES} == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500", "GROUP_RANK": "0", "NODE_RANK": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        (HYDRA, "0"),  # all ranks are here
        (SRUN, "1"),
        ({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "7"}, "1"),  # srun --mpi=pmi2
        ({**PALS, "PALS_NODEID": "1"}, "1"),
        (PALS, None),
        (FLUX, None),
        (JSM, None),
        (OPENMPI, None),
        ({**SRUN, **OPENMPI}, None),  # SLURM_NODEID counts the hosts of the daemons, without the one of mpirun
    ],
)
def test_the_number_of_the_node(environ: dict[str, str], node: str | None) -> None:
    environ = dict(environ)
    provide(environ)
    assert (environ.get("GROUP_RANK"), environ.get("NODE_RANK")) == (node, node)
    provide_node_rank(1, environ)  # as MPI says
    assert (environ["GROUP_RANK"], environ["NODE_RANK"]) == (node or "1", node or "1")
    assert not {"GROUP_RANK", "NODE_RANK"} & set(without_job(environ))


def test_threads_that_a_rank_has_chosen_are_not_those_of_a_job_that_it_starts() -> None:
    environ = {**HYDRA, ADDED: "MASTER_PORT=4001", "MASTER_PORT": "4001"}
    provide_here("OMP_NUM_THREADS", "3", environ)
    assert environ["OMP_NUM_THREADS"] == "3"
    assert not {"OMP_NUM_THREADS", "MASTER_PORT"} & set(without_job(environ))
    assert without_job({**environ, "OMP_NUM_THREADS": "5"})["OMP_NUM_THREADS"] == "5"


def test_what_the_user_has_set_stays() -> None:  # trap 77
    for name in TORCH_VARIABLES:
        environ = {**OPENMPI, name: "mine"}
        provide(environ)
        assert environ[name] == "mine"
        assert environ["RANK"] == ("mine" if name == "RANK" else "5")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        (SBATCH, False),
        (OPENMPI, True),
        (HYDRA, True),
        (SRUN, True),
        ({**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, True),
        # torchrun, alone, in a batch script, as a task of srun, in a rank of mpirun
        ({"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4"}, False),
        ({**SBATCH, "TORCHELASTIC_RUN_ID": "none"}, False),
        ({**SRUN, "TORCHELASTIC_RUN_ID": "none"}, False),
        ({**OPENMPI, "TORCHELASTIC_RUN_ID": "none"}, False),
        # what is started by hand in a shell of `srun --pty bash`
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)
def test_started_by_mpi(environ: dict[str, str], expected: bool) -> None:
    assert started_by_mpi(environ) is expected


def test_open_mpis_settings_are_for_its_ranks() -> None:
    for environ in (OPENMPI, SRUN, {**OPENMPI, "OMPI_MCA_smsc": "cma"}):
        changed: dict[str, str] = dict(environ)
        open_mpi_settings.provide(changed)
        assert changed == {**open_mpi_settings.ALWAYS, **environ}
    four = {**OPENMPI, open_mpi_settings.OF_OPEN_MPI_4: "2"}  # its provider net, also where mpi4py starts MPI first
    open_mpi_settings.provide(changed := dict(four))
    assert "FI_PROVIDER" not in inherited.without_job(changed), "a job that a rank starts chooses anew"
    assert changed.pop(inherited.ADDED) == "FI_PROVIDER=^net"
    assert changed == {**open_mpi_settings.ALWAYS, **open_mpi_settings.of_version((4,), one_host=False), **four}
    open_mpi_settings.provide(changed := {**four, "FI_PROVIDER": "psm2"})
    assert changed["FI_PROVIDER"] == "psm2"
    for environ in ({}, SBATCH, HYDRA, MVAPICH):
        changed = dict(environ)
        open_mpi_settings.provide(changed)
        assert changed == environ


def test_several_hosts_without_a_scheduler_leave_the_address_open() -> None:
    environ = dict(OPENMPI)
    provide(environ)
    assert "MASTER_ADDR" not in environ
    assert 20000 <= int(environ["MASTER_PORT"]) < 30000


def test_the_port_is_the_same_on_all_ranks_and_differs_between_jobs() -> None:
    def port(**environ: str) -> str:
        mine: dict[str, Any] = {**OPENMPI, **environ}
        provide(mine)
        return str(mine["MASTER_PORT"])

    assert port(OMPI_COMM_WORLD_RANK="0") == port(OMPI_COMM_WORLD_RANK="7", OMPI_COMM_WORLD_LOCAL_RANK="3")
    assert port() != port(PMIX_NAMESPACE="prterun-node1-4583@1")


def test_slurm_names_the_first_host() -> None:
    for launcher in ({}, OPENMPI):
        environ = {**SRUN, **launcher}
        provide(environ)
        assert environ["MASTER_ADDR"] == "gpu03"


def test_a_child_of_a_rank_gets_its_own_values_not_its_parents() -> None:
    """A program that a rank starts under a launcher of its own inherits RANK from us; that value is nobody's wish."""
    environ = dict(OPENMPI)
    provide(environ)
    child = {name: value for name, value in environ.items() if not name.startswith(("OMPI", "PMIX"))} | HYDRA
    child["MASTER_ADDR"] = "mine"
    provide(child)
    assert (child["RANK"], child["WORLD_SIZE"], child["MASTER_ADDR"]) == ("1", "2", "mine")


@pytest.mark.parametrize("launcher", [OPENMPI, HYDRA, SRUN, PALS, FLUX, JSM, MVAPICH])
def test_a_new_job_can_be_started_from_inside_a_rank(launcher: dict[str, str]) -> None:  # trap 57
    environ = {**launcher, "PATH": "/bin", OWNER: "17"}
    provide(environ)
    clean = without_job(environ)
    assert detect(clean) is None
    assert not {OWNER, PROVIDED, *TORCH_VARIABLES} & set(clean)
    assert clean["PATH"] == "/bin"


SETTINGS = {
    "OMPI_MCA_btl": "^ofi", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PRTE_MCA_hwloc_default_binding_policy": "none",
    "HYDRA_LAUNCHER": "ssh", "PMIX_MCA_gds": "hash", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "MPI4PY_LIBMPI": "/x/libmpi.so.40",
    "OMP_NUM_THREADS": "3", "MASTER_ADDR": "mine", "MASTER_PORT": "1",
}  # fmt: skip
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "stays"),
    [
        (SETTINGS, SETTINGS),
        ({**OPENMPI, **SETTINGS}, SETTINGS),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}),  # of the shell, outside a job
        ({**TORCHRUN, "PATH": "/bin"}, {"PATH": "/bin"}),  # a worker of torchrun starts a job
        # an outer mpicoll.run has chosen both; the port has changed since, and is the user's
        (
            {**HYDRA, "OMP_NUM_THREADS": "8", "MASTER_PORT": "4000", ADDED: "OMP_NUM_THREADS=8\nMASTER_PORT=4001"},
            {"HYDRA_LAUNCHER": "ssh", "MASTER_PORT": "4000"},
        ),
    ],
)
def test_what_a_job_inside_another_one_inherits(environ: dict[str, str], stays: dict[str, str]) -> None:
    assert without_job(environ) == stays


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("one", ["one"]),
        ("a,b", ["a", "b"]),
        ("node[07-09,12],big1", ["node07", "node08", "node09", "node12", "big1"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[098-101].example.org", ["n098.example.org", "n099.example.org", "n100.example.org", "n101.example.org"]),
        ("n[x]", []),
    ],
)
def test_slurm_host_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts
    assert first_host(text) == (hosts[0] if hosts else None)


@pytest.mark.parametrize(
    ("text", "counts"), [("4(x2),3", [4, 4, 3]), ("1", [1]), ("2,2", [2, 2]), ("", []), ("4(x", []), ("many", [])]
)
def test_slurm_task_lists(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts
