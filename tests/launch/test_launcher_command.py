"""The commands of srun and of MPICOLL_LAUNCHER_COMMAND, in made-up jobs; pure."""

import re
from typing import Any

import pytest

from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch.job import Plan, Program, Request
from mpicoll._launch.plan import plan
from mpicoll.errors import LaunchError
from tests.launch.made_up import MPICH, OPENMPI, a_site, one

SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
}  # fmt: skip
PBS = {"PBS_JOBID": "7", "PBS_NODEFILE": "n1\n" * 4 + "n2\n" * 4}
ALL_FIELDS = "-n {ranks} -N {per_node} --nodes={nodes} -H {hosts}"


def made(mpiexec: Mpiexec, environ: dict[str, str], *programs: Program, mpi: Mpi = OPENMPI[0], **options: Any) -> Plan:
    request = Request(**{name: options.pop(name) for name in list(options) if name in Request.__dataclass_fields__})
    return plan(programs or (one(),), mpi, mpiexec, a_site(**environ), request=request, **options)


def by_srun(*programs: Program, mpi: Mpi = OPENMPI[0], environ: dict[str, str] | None = None, **options: Any) -> Plan:
    mpiexec = Mpiexec("/s/srun", "srun", (), pmi="pmix" if mpi.family == "openmpi" else "pmi2")
    return made(mpiexec, SLURM if environ is None else environ, *programs, mpi=mpi, **options)


def by_template(template: str, *programs: Program, environ: dict[str, str] | None = None, **options: Any) -> Plan:
    """In a job of PBS, unless ``environ`` says something else."""
    mpiexec = Mpiexec("/s/aprun", "template", (), template=tuple(template.split()))
    return made(mpiexec, PBS if environ is None else environ, *programs, **options)


def words(planned: Plan) -> str:
    """The command without the program."""
    return re.sub(r" /py -u( -m mpicoll\._launch\.rank)? x\.py$", "", " ".join(planned.command))


# --- srun ---

DEFAULT = "/s/srun --mpi=pmix --kill-on-bad-exit=1 --export=ALL -n 8 -N 2 --ntasks-per-node=4 --cpu-bind=none"


def test_a_whole_job_by_srun() -> None:
    planned = by_srun()
    assert words(planned) == DEFAULT
    assert any(note.startswith("8 ranks: the tasks of ") for note in planned.notes)
    assert planned.added["MASTER_ADDR"] == "n1"
    assert planned.added["OMP_NUM_THREADS"] == "2"
    assert planned.added["OMPI_MCA_btl_tcp_flags"] == "send,inplace"  # what ranks of Open MPI need
    assert not [name for name in planned.added if name.startswith(("PRTE_", "OMPI_ALLOW", "SLURM_"))]  # what mpirun needs
    assert planned.other_hosts == ("n1", "n2")
    mpich = by_srun(mpi=MPICH[0])
    assert words(mpich) == DEFAULT.replace("--mpi=pmix", "--mpi=pmi2")
    assert not [name for name in mpich.added if name.startswith(("OMPI_", "SLURM_"))]


HOSTS = one(hosts="a:2,b:2")


@pytest.mark.parametrize(
    ("program", "options", "expected"),
    [
        (one(per_node=2), {}, "-n 4 -N 2 --ntasks-per-node=2"),
        (one(), {"nodes": 1}, "-n 4 -N 1 --ntasks-per-node=4"),
        (one(4), {}, "-n 4 -N 1 --ntasks-per-node=4"),  # a node is filled before the next
        (one(6), {}, "-n 6 --cpu-bind"),
        (HOSTS, {}, "-n 4 -N 2 --nodelist=a,b --ntasks-per-node=2"),
        (one(), {"bind_to": "core"}, "--cpu-bind=cores"),
        (one(), {"bind_to": "numa"}, "--cpu-bind=ldoms"),
        (one(), {"bind_to": "socket"}, "--cpu-bind=sockets"),
        (one(), {"tag_output": True}, "--label"),
        (one(), {"mpiexec_args": ("--theirs",)}, "--cpu-bind=none --theirs"),
    ],
)
def test_the_words_of_srun(program: Program, options: dict[str, Any], expected: str) -> None:
    assert expected in words(by_srun(program, **options))


def test_the_nodes_of_a_job_of_slurm() -> None:
    assert by_srun(one(per_node=2)).added["OMP_NUM_THREADS"] == "4"
    assert by_srun(HOSTS).added["MASTER_ADDR"] == "a"
    with pytest.raises(LaunchError, match="--nnodes 3: Slurm job 7 has 2: n1,n2"):
        by_srun(nodes=3)
    assert "-N 2 --nodelist=a,b " in words(by_srun(one(hosts="a,b,c"), nodes=2))  # (--nnodes had no effect on a host list)
    with pytest.raises(LaunchError, match="a:2,b:1: launchers other than mpiexec"):
        by_srun(one(hosts="a:2,b:1"))


def test_srun_gives_each_task_the_cpus_of_sbatch() -> None:
    planned = by_srun(environ={**SLURM, "SLURM_CPUS_PER_TASK": "5"})
    assert "--cpus-per-task=5" in planned.command
    assert "--cpu-bind" not in " ".join(planned.command)
    assert planned.added["OMP_NUM_THREADS"] == "5"


def test_srun_outside_a_job() -> None:
    """srun asks for nodes itself; the ranks find the first host by Slurm's variables, or by MPI."""
    planned = by_srun(one(6), environ={}, nodes=2)
    assert "-n 6 -N 2 --ntasks-per-node=3" in words(planned)
    assert words(by_srun(one(per_node=3), environ={}, nodes=2)) == words(planned)  # (3 ranks were started)
    assert not {"MASTER_ADDR", "OMP_NUM_THREADS"} & set(planned.added)
    with pytest.raises(LaunchError, match="--launcher srun: outside a job of a scheduler, say how many ranks"):
        by_srun(environ={})


# --- MPICOLL_LAUNCHER_COMMAND ---


@pytest.mark.parametrize(
    ("template", "program", "options", "expected"),
    [
        (ALL_FIELDS, one(), {}, "-n 8 -N 4 --nodes=2 -H n1,n2"),
        (ALL_FIELDS, one(6), {}, "-n 6 -N 4 --nodes=2 -H n1,n2"),
        (ALL_FIELDS, one(4), {}, "-n 4 -N 4 --nodes=1 -H n1"),
        (ALL_FIELDS, one(per_node=2), {}, "-n 4 -N 2 --nodes=2 -H n1,n2"),
        (ALL_FIELDS, one(), {"nodes": 1}, "-n 4 -N 4 --nodes=1 -H n1"),
        (ALL_FIELDS, HOSTS, {}, "-n 4 -N 2 --nodes=2 -H a,b"),
        ("--nrs {nodes} --tasks={per_node}", one(), {}, "--nrs 2 --tasks=4"),
        ("-n {ranks} {{a}}", one(), {"mpiexec_args": ("--theirs",)}, "-n 8 {a} --theirs"),
        ("-n {ranks}", one(3), {"environ": {}}, "-n 3"),
        ("-n {ranks} -H {hosts}", one(2, hosts="a"), {"environ": {}}, "-n 2 -H a"),
        (ALL_FIELDS, HOSTS, {"environ": {}}, "-n 4 -N 2 --nodes=2 -H a,b"),
    ],
)
def test_a_template(template: str, program: Program, options: dict[str, Any], expected: str) -> None:
    assert words(by_template(template, program, **options)) == f"/s/aprun {expected}"


def test_what_a_template_adds_to_the_environment() -> None:
    planned = by_template("-n {ranks}")
    assert planned.added["MASTER_ADDR"] == "n1"
    assert planned.added["OMPI_MCA_btl_tcp_flags"] == "send,inplace"
    assert planned.other_hosts == ("n1", "n2")


@pytest.mark.parametrize(
    ("template", "program", "options", "said"),
    [
        # broken
        ("-n {ranks", one(), {}, "{ranks: expected '}' before end of string; write {{ and }} for braces that are no field"),
        ("-n {}", one(), {}, "{} is no field; use {ranks}, {per_node}, {nodes}, {hosts}"),
        ("-n {size}", one(), {}, "{size} is no field"),
        ("-n {ranks.real}", one(), {}, "{ranks.real} is no field"),
        ("-n {ranks:>4}", one(), {}, "{ranks:>4} is no field"),
        # not known outside a job
        (ALL_FIELDS, one(2), {"environ": {}}, "{per_node} is not known here; give --nproc-per-node K, or start inside a job"),
        ("-n {ranks} {nodes}", one(2), {"environ": {}}, "{nodes} is not known here; give --nnodes N"),
        ("-n {ranks} {hosts}", one(2), {"environ": {}}, "{hosts} is not known here; give --host A,B or --hostfile FILE"),
        ("-n {ranks}", one(), {"environ": {}}, "outside a job of a scheduler, say how many ranks to start, with -n N"),
        # the template does not express what the user asks for
        ("-n 4", one(), {}, "does not say how many ranks to start, here 8; add {ranks}"),
        ("{nodes} {per_node}", one(6), {}, "does not say how many ranks to start, here 6; add {ranks}"),
        ("-n {ranks}", one(hosts="a"), {}, "--host, --hostfile: MPICOLL_LAUNCHER_COMMAND lacks {hosts}; add it"),
        ("-n {ranks} {hosts}", HOSTS, {}, "a number of ranks beside a host: MPICOLL_LAUNCHER_COMMAND lacks {per_node}"),
        ("-n {ranks} {hosts}", one(per_node=2), {}, "--nproc-per-node, or "),
        ("-n {ranks}", one(), {"nodes": 1}, "--nnodes: MPICOLL_LAUNCHER_COMMAND lacks {nodes}"),
        (ALL_FIELDS, one(), {"bind_to": "core"}, "--bind-to: MPICOLL_LAUNCHER_COMMAND cannot express it"),
        (ALL_FIELDS, one(), {"map_by": "numa"}, "--map-by: MPICOLL_LAUNCHER_COMMAND cannot express it"),
        (ALL_FIELDS, one(), {"tag_output": True}, "--tag-output: MPICOLL_LAUNCHER_COMMAND cannot express it"),
        (ALL_FIELDS, one(), {"oversubscribe": True}, "--oversubscribe: MPICOLL_LAUNCHER_COMMAND cannot express it"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_start_the_job(template: str, program: Program, options: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(said)) as raised:
        by_template(template, program, **options)
    assert "MPICOLL_LAUNCHER_COMMAND" in str(raised.value)


# --- both ---


@pytest.mark.parametrize(
    ("planned", "chosen"),
    [(by_srun, "--launcher srun"), (lambda *rest, **more: by_template(ALL_FIELDS, *rest, **more), "MPICOLL_LAUNCHER_COMMAND")],
)
def test_what_these_launchers_cannot_do(planned: Any, chosen: str) -> None:
    with pytest.raises(LaunchError, match=f"--fault-tolerant: under {chosen}"):
        planned(fault_tolerant=True)
    with pytest.raises(LaunchError, match=r"--map-by numa: give srun its own option|--map-by: .* cannot express it"):
        planned(map_by="numa")
    with pytest.raises(LaunchError, match=f"several programs: {chosen} cannot place them; use --launcher mpiexec"):
        planned(one(1), one(7))


def test_srun_names_the_units_of_binding() -> None:
    with pytest.raises(LaunchError, match="--bind-to cor: --launcher srun takes none, core, socket, package, numa, hwthread"):
        by_srun(bind_to="cor")
