"""The command of each launcher of a scheduler, in made-up jobs; pure."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpicoll._discovery.find import Mpi, Mpiexec
from mpicoll._launch.job import Plan, Program, Request
from mpicoll._launch.launcher_command import Layout, layout_of
from mpicoll._launch.plan import plan
from mpicoll.errors import LaunchError
from tests.launch.made_up import MPICH, OPENMPI, a_site, one

PMI = {("srun", "Open MPI"): "pmix", ("srun", "MPICH"): "pmi2", ("pals", "Open MPI"): "pmix", ("flux", "Open MPI"): "pmix"}

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}  # fmt: skip
PBS = {"PBS_JOBID": "7", "PBS_NODEFILE": "n1\n" * 4 + "n2\n" * 4}
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch1 1 n1 4 n2 4", "CSM_ALLOCATION_ID": "1", "LSB_DJOB_HOSTFILE": ""}
FLUX = {"FLUX_URI": "local:///f", "FLUX_ENCLOSING_ID": "f7"}
JOBS = {"srun": SLURM, "pals": PBS, "flux": FLUX, "jsrun": LSF}
EACH = pytest.mark.parametrize("launcher", JOBS)


def planned(
    launcher: str, *programs: Program, mpi: Mpi = OPENMPI[0], environ: dict[str, str] | None = None, **options: Any
) -> Plan:
    mpiexec = Mpiexec(f"/s/{launcher}", launcher, (), pmi=PMI.get((launcher, mpi.vendor), ""))
    site = a_site(**(JOBS[launcher] if environ is None else environ))
    request = Request(**{name: options.pop(name) for name in list(options) if name in Request.__dataclass_fields__})
    return plan(programs or (one(),), mpi, mpiexec, site, request=request, **options)


def words(made: Plan) -> str:
    """The command without the program."""
    text = " ".join(made.command)
    return re.sub(r" /py -u( -m mpicoll\._launch\.rank)? x\.py$", "", text)


DEFAULTS = {
    "srun": "/s/srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL -n 8 -N 2 --ntasks-per-node=4 --cpu-bind=none",
    "pals": "/s/pals --pmi pmix --ppn 4 --cpu-bind none -n 8",
    "flux": "/s/flux run -o exit-on-error -o pmi=pmix -N 2 --tasks-per-node=4 --exclusive -o cpu-affinity=on",
    "jsrun": "/s/jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 4 --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none -X 1",
}


@EACH
def test_a_whole_job(launcher: str) -> None:
    made = planned(launcher)
    assert words(made) == DEFAULTS[launcher]
    assert any(note.startswith("8 ranks: the tasks of ") for note in made.notes)
    assert made.added["MASTER_ADDR"] == "n1"
    assert made.added.get("OMP_NUM_THREADS") == ("2" if launcher == "srun" else None)  # only Slurm says how many cores there are
    assert made.added["OMPI_MCA_btl_tcp_flags"] == "send,inplace"  # what ranks of Open MPI need
    assert not [name for name in made.added if name.startswith(("PRTE_", "OMPI_ALLOW", "SLURM_"))]  # what mpirun needs
    assert made.other_hosts == ("n1", "n2")


@pytest.mark.parametrize("launcher", ["srun", "pals", "flux"])
def test_mpich_has_another_interface(launcher: str) -> None:
    expected = {"srun": ("--mpi=pmix", "--mpi=pmi2"), "pals": ("--pmi pmix ", ""), "flux": ("-o pmi=pmix ", "")}[launcher]
    made = planned(launcher, mpi=MPICH[0])
    assert words(made) == DEFAULTS[launcher].replace(*expected)
    assert not [name for name in made.added if name.startswith(("OMPI_", "SLURM_"))]


HOSTS = one(hosts="a:2,b:2")
REFUSED = {
    "6 ranks": LaunchError("6 ranks: jsrun starts equally many on every node"),
    "hosts": LaunchError("--host a,b: jsrun takes the nodes of the job"),
    "binding": LaunchError("--bind-to (core|numa|socket): --launcher (flux|jsrun) takes none"),
}
FIRST_NODE = (
    "-n 4 -N 1 --ntasks-per-node=4", "--ppn 4 --cpu-bind none -n 4", "-N 1 --tasks-per-node=4 --exclusive",
    "--nrs 1 --rs_per_host 1 --tasks_per_rs 4",
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        (one(per_node=2), {}, ("-n 4 -N 2 --ntasks-per-node=2", "--ppn 2 --cpu-bind none -n 4",
                               "-N 2 --tasks-per-node=2 --exclusive", "--nrs 2 --rs_per_host 1 --tasks_per_rs 2")),
        (one(), {"nodes": 1}, FIRST_NODE),
        (one(4), {}, FIRST_NODE),  # a node is filled before the next
        (one(6), {}, ("-n 6 --cpu-bind", "--ppn 4 --cpu-bind none -n 6", "-o pmi=pmix -n 6 -o", REFUSED["6 ranks"])),
        (HOSTS, {}, ("-n 4 -N 2 --nodelist=a,b --ntasks-per-node=2", "--hosts a,b --ppn 2",
                     "--requires=host:a,b -N 2 --tasks-per-node=2", REFUSED["hosts"])),
        (one(), {"bind_to": "core"}, ("--cpu-bind=cores", "--cpu-bind core", "-o cpu-affinity=per-task", REFUSED["binding"])),
        (one(), {"bind_to": "numa"}, ("--cpu-bind=ldoms", "--cpu-bind numa", REFUSED["binding"], REFUSED["binding"])),
        (one(), {"bind_to": "socket"}, ("--cpu-bind=sockets", "--cpu-bind socket", REFUSED["binding"], REFUSED["binding"])),
    ],
    ids=["ranks on each node", "nodes=1", "4 ranks", "6 ranks", "named hosts", "cores", "numa", "sockets"],
)  # fmt: skip
def test_the_words_of_each_launcher(program: Program, options: dict[str, Any], expected: tuple[str | LaunchError, ...]) -> None:
    """expected: of srun, pals, flux and jsrun."""
    for launcher, said in zip(JOBS, expected, strict=True):
        if isinstance(said, LaunchError):
            with pytest.raises(LaunchError, match=str(said)):
                planned(launcher, program, **options)
        else:
            assert said in words(planned(launcher, program, **options))


@EACH
def test_the_nodes_of_a_job(launcher: str) -> None:
    made = planned(launcher, one(per_node=2))
    assert made.added.get("OMP_NUM_THREADS") == ("4" if launcher == "srun" else None)
    with pytest.raises(LaunchError, match=r"--nnodes 3: .* job f?7 has 2: n1,n2"):
        planned(launcher, nodes=3)
    if launcher != "jsrun":
        assert planned(launcher, HOSTS).added["MASTER_ADDR"] == "a"
        with pytest.raises(LaunchError, match="a:2,b:1: launchers other than mpiexec"):
            planned(launcher, one(hosts="a:2,b:1"))


@EACH
def test_tagged_output(launcher: str) -> None:
    option = {"srun": "--label", "pals": "--label", "flux": "--label-io", "jsrun": "--stdio_mode prepended"}[launcher]
    assert option in words(planned(launcher, tag_output=True))
    assert option not in words(planned(launcher))


@EACH
def test_the_words_of_the_user_come_last(launcher: str) -> None:
    assert words(planned(launcher, extra=["--theirs"])).endswith(" --theirs")


@EACH
def test_what_these_launchers_cannot_do(launcher: str) -> None:
    with pytest.raises(LaunchError, match=f"--fault-tolerant: under {launcher}"):
        planned(launcher, fault_tolerant=True)
    with pytest.raises(LaunchError, match=f"--map-by numa: give {launcher} its own option"):
        planned(launcher, map_by="numa")
    if launcher == "pals":
        assert " ".join(planned(launcher, one(1), one(7)).command).endswith("-n 1 /py -u x.py : -n 7 /py -u x.py")
    else:
        with pytest.raises(LaunchError, match=f"several programs: --launcher {launcher}"):
            planned(launcher, one(1), one(7))


def test_srun_gives_each_task_the_cpus_of_sbatch() -> None:
    made = planned("srun", environ={**SLURM, "SLURM_CPUS_PER_TASK": "5"})
    assert "--cpus-per-task=5" in made.command
    assert "--cpu-bind" not in " ".join(made.command)
    assert made.added["OMP_NUM_THREADS"] == "5"


@EACH
def test_outside_a_job(launcher: str) -> None:
    """srun and flux run ask for nodes themselves; the ranks find the first host by Slurm's variables, or by MPI."""
    with pytest.raises(LaunchError, match=f"--launcher {launcher}: outside a job of its scheduler, say how many ranks"):
        planned(launcher, environ={})
    if launcher != "jsrun":
        made = planned(launcher, one(6), environ={}, nodes=2)
        assert "-n 6" in words(made) or "-N 2 --tasks-per-node=3" in words(made)
        assert not {"MASTER_ADDR", "OMP_NUM_THREADS"} & set(made.added)


def test_layouts() -> None:
    assert layout_of(None, 6, None, None) == Layout()
    assert layout_of(None, 6, None, 4) == Layout((), 3, 2, True)
    assert layout_of(None, 5, None, 2) == Layout((), 2, 3, False)
    assert layout_of((("a", 2), ("b", 2)), 4, None, None) == Layout(("a", "b"), 2, 2, True)
