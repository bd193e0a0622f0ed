"""The mpiexec command that is made for every situation; pure, for a made-up machine."""

import itertools
import re
from dataclasses import replace

import pytest

from mpicoll._base.inherited import SUPERVISOR
from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch.job import NOTHING_ASKED, Plan, Request
from mpicoll.errors import LaunchError
from tests.launch.made_up import MPICH, OPENMPI, OPENMPI4, Asked, a_site, one, planned

ANY = pytest.mark.parametrize("mpi", [OPENMPI, OPENMPI4, MPICH], ids=["openmpi", "openmpi4", "mpich"])


def where(made: Plan) -> list[dict[str, int] | None]:
    """The hosts of each program of the command; of all programs for MPICH; None: mpiexec is told none."""
    programs = " ".join(made.command).split(" : ")
    found = [re.search(r" --?hosts? (\S+)", each) for each in programs[: len(programs) if made.family == "openmpi" else 1]]
    return [each and {name: int(count) for name, count in re.findall(r"([^,:]+):(\d+)", each[1])} for each in found]


# --- how many ranks, and where ---


@ANY
def test_the_number_of_ranks_defaults_to_the_usable_cores(mpi: tuple[Mpi, Mpiexec]) -> None:
    made = planned(one(), mpi=mpi, site=a_site(cores=3))
    assert "-n 3" in " ".join(made.command)
    assert "3 ranks: one for each core" in made.notes[0]


@pytest.mark.parametrize(
    ("program", "placement"),
    [
        (one(hosts="a:2,b:3"), {"a": 2, "b": 3}),
        (one(3, hosts="a:2,b:3"), {"a": 2, "b": 1}),
        (one(2, hosts="a:2,b:3"), {"a": 2}),
        (one(4, hosts="a,b"), {"a": 2, "b": 2}),
        (one(3, hosts="a,b"), {"a": 2, "b": 1}),
        (one(hosts="a,b"), {"a": 1, "b": 1}),
        (one(hosts="a,b", per_node=4), {"a": 4, "b": 4}),
        (one(5, hosts="a,b", per_node=4), {"a": 4, "b": 1}),
        (one(hosts="a:1,b:1", per_node=4), {"a": 4, "b": 4}),
    ],
)
def test_ranks_fill_the_hosts_in_order(program: Asked, placement: dict[str, int]) -> None:
    assert where(planned(program)) == [placement]
    hosts = ",".join(f"{host}:{count}" for host, count in placement.items())
    for mpi, option in ((OPENMPI, "--host"), (MPICH, "-hosts")):
        command = planned(program, mpi=mpi).command
        assert command[command.index(option) + 1] == hosts
        assert command[command.index("-n") + 1] == str(sum(placement.values()))


@pytest.mark.parametrize("mpi", [OPENMPI, MPICH], ids=["openmpi", "mpich"])
def test_more_ranks_than_places_is_an_error_that_says_what_to_do(mpi: tuple[Mpi, Mpiexec]) -> None:
    with pytest.raises(LaunchError, match=r"6 ranks .* hosts a:2,b:3 have 5 places; raise .* or lower -n"):
        planned(one(6, hosts="a:2,b:3"), mpi=mpi)


def test_several_programs() -> None:
    text = " ".join(planned(one(1, name="s.py"), one(4, name="w.py")).command)
    assert text == "/o/bin/mpiexec -n 1 /py s.py : -n 4 /py w.py"
    common = planned(one(1, "a:2,b:3", name="s.py"), one(4, name="w.py"))
    assert where(common) == [{"a": 1}, {"a": 1, "b": 3}]
    assert common.added["MASTER_ADDR"] == "a"
    mpich = planned(one(1, "a:2,b:3", name="s.py"), one(4, name="w.py"), mpi=MPICH).command
    assert mpich[mpich.index("-hosts") + 1] == "a:2,b:3"


# --- the environment ---


def test_root_is_allowed_only_for_root() -> None:
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in planned(one(2)).added
    added = planned(one(2), site=a_site(uid=0)).added
    assert added["OMPI_ALLOW_RUN_AS_ROOT"] == added["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert not any("ROOT" in name for name in planned(one(2), mpi=MPICH, site=a_site(uid=0)).added)


def test_more_ranks_than_cores_are_allowed_unless_they_are_bound() -> None:
    name = "PRTE_MCA_rmaps_default_mapping_policy"
    for request in (NOTHING_ASKED, Request(bind_to="none"), Request(map_by="numa")):
        assert planned(one(4), request=request).added[name] == "slot:oversubscribe"
    assert planned(one(4), mpi=OPENMPI4).added["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert name not in planned(one(4), request=Request(bind_to="core")).added
    assert name not in planned(one(4), mpi=MPICH).added


def test_what_the_user_has_set_is_never_overridden() -> None:
    binding = "PRTE_MCA_hwloc_default_binding_policy"
    environ = {
        "PRTE_MCA_rmaps_default_mapping_policy": "core", "OMP_NUM_THREADS": "7", "MASTER_ADDR": "mine", "MASTER_PORT": "1",
        binding: "core",
    }  # fmt: skip
    added = planned(one(4), site=a_site(cores=2, **environ)).added
    assert not set(environ) & set(added)
    assert binding not in planned(one(4), site=a_site(settings=frozenset({binding}))).added
    bound = planned(one(4), request=Request(mpiexec_args=("--bind-to", "numa")))
    assert "PRTE_MCA_hwloc_default_binding_policy" not in bound.added
    assert bound.command[:3] == ("/o/bin/mpiexec", "--bind-to", "numa")


def test_the_master_is_the_first_host() -> None:
    assert planned(one(2)).added["MASTER_ADDR"] == "localhost"
    assert planned(one(2, "a,b")).added["MASTER_ADDR"] == "a"
    assert planned(one(2, "localhost,b")).added["MASTER_ADDR"] == "here"  # b could not reach "localhost"
    assert planned(one(2)).added["MASTER_PORT"] == "12345"


def test_variables_reach_other_hosts() -> None:
    site = a_site(PYTHONPATH="/p", SECRET="s", MPICOLL_OVERRIDE_MPI="1", OMP_NUM_THREADS="2")
    command = planned(one(2, "a,b"), site=site, request=Request(exported=("SECRET",))).command
    sent = {name for flag, name in itertools.pairwise(command) if flag == "-x"}
    assert sent == {"PYTHONPATH", "SECRET", "MPICOLL_OVERRIDE_MPI", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", SUPERVISOR}
    assert "-x" not in planned(one(2), site=site).command  # on one host the environment is inherited
    mpich = planned(one(2, "a,b"), mpi=MPICH, site=site).command
    assert mpich[mpich.index("MASTER_ADDR") - 1 :][:3] == ("-genv", "MASTER_ADDR", "a")


@pytest.mark.parametrize("mpi", [OPENMPI, MPICH], ids=["openmpi", "mpich"])
def test_in_a_slurm_allocation(mpi: tuple[Mpi, Mpiexec]) -> None:
    slurm = a_site(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]", SLURM_TASKS_PER_NODE="4(x2)", SLURM_NTASKS="8")
    made = planned(one(), mpi=mpi, site=slurm)
    text = " ".join(made.command)
    assert "-n 8" in text
    assert "-host" not in text  # mpiexec reads the allocation
    assert made.added["MASTER_ADDR"] == "n1"
    assert made.added.get("SLURM_MPI_TYPE") == ("none" if mpi is MPICH else None)
    task = replace(slurm, environ={**slurm.environ, "SLURM_MPI_TYPE": "pmix"})  # of `srun --mpi=pmix --pty bash`
    assert planned(one(), mpi=mpi, site=task).added.get("SLURM_MPI_TYPE") == ("none" if mpi is MPICH else None)
    per_node = " ".join(planned(one(per_node=2), mpi=mpi, site=slurm).command)
    assert ("--map-by ppr:2:node" if mpi is OPENMPI else "-ppn 2") in per_node
    assert "-n 4" in per_node


# The variables of two nodes with four slots each; a_site takes the path of a file for its text.
SCHEDULERS = {
    "PBS job 7.pbs": {"PBS_JOBID": "7.pbs", "PBS_NODEFILE": "n1\nn1\nn1\nn1\nn2\nn2\nn2\nn2\n"},
    "LSF job 7": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 4 n2 4 ", "LSB_DJOB_HOSTFILE": ""},
}
EACH_SCHEDULER = pytest.mark.parametrize("job", SCHEDULERS)


@ANY
@EACH_SCHEDULER
def test_in_a_job_of_each_scheduler(job: str, mpi: tuple[Mpi, Mpiexec]) -> None:
    site = a_site(**SCHEDULERS[job])
    made = planned(one(), mpi=mpi, site=site)
    assert where(made) == [{"n1": 4, "n2": 4}]
    assert f"8 ranks: the tasks of {job} (-n sets another number)" in made.notes
    assert made.added["MASTER_ADDR"] == "n1"
    assert made.other_hosts == ("n1", "n2")
    assert where(planned(one(6), mpi=mpi, site=site)) == [{"n1": 4, "n2": 2}]
    assert where(planned(one(per_node=2), mpi=mpi, site=site)) == [{"n1": 2, "n2": 2}]
    assert where(planned(one(), mpi=mpi, site=site, request=Request(nodes=1))) == [{"n1": 4}]
    assert where(planned(one(hosts="a,b"), mpi=mpi, site=site)) == [{"a": 1, "b": 1}]
    assert where(planned(one(1, name="s.py"), one(5, name="w.py"), mpi=mpi, site=site)) == (
        [{"n1": 4, "n2": 2}] if mpi is MPICH else [{"n1": 1}, {"n1": 3, "n2": 2}]
    )
    with pytest.raises(LaunchError, match=f"--nnodes 3: {job} has 2: n1,n2"):
        planned(one(), mpi=mpi, site=site, request=Request(nodes=3))


def test_more_ranks_than_slots_are_spread_over_the_nodes_of_a_job() -> None:
    """PBS lists each node once unless the user asks for mpiprocs, and Open MPI refuses more ranks than lines."""
    site = a_site(PBS_JOBID="7", PBS_NODEFILE="n1\nn2\n")
    for program in (one(8), one(per_node=4)):
        made = planned(program, site=site)
        assert where(made) == [{"n1": 4, "n2": 4}]


@ANY
def test_a_job_inside_a_task_of_srun_shares_its_cpus(mpi: tuple[Mpi, Mpiexec]) -> None:
    site = replace(a_site(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n1"), in_step=True)
    assert planned(one(2), mpi=mpi, site=site).added["SLURM_OVERLAP"] == "1"
    assert "SLURM_OVERLAP" not in planned(one(2), mpi=mpi, site=replace(site, in_step=False)).added


@ANY
def test_a_job_on_this_host_alone(mpi: tuple[Mpi, Mpiexec]) -> None:
    site = a_site(PBS_JOBID="7", PBS_NODEFILE="here.cluster\n" * 3)
    made = planned(one(), mpi=mpi, site=site)
    assert where(made) == [None]
    assert "-n 3" in " ".join(made.command)
    assert made.added["MASTER_ADDR"] == "localhost"


# --- a number of nodes ---

SLURM_3 = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x3)", "SLURM_NTASKS": "12"}


@pytest.mark.parametrize(
    ("program", "nodes", "environ", "expected"),
    [
        (one(hosts="a:2,b:2,c:2"), 2, {}, {"a": 2, "b": 2}),
        (one(hosts="a,b", per_node=3), 2, {}, {"a": 3, "b": 3}),
        (one(hosts="a,b"), 3, {}, "--nnodes 3: the host list has 2: a,b"),
        (one(), 2, SLURM_3, {"n1": 4, "n2": 4}),
        (one(per_node=1), 2, SLURM_3, {"n1": 1, "n2": 1}),
        (one(), 4, SLURM_3, "--nnodes 4: Slurm job 7 has 3: n1,n2,n3"),
        (one(2), 1, {}, None),
        (one(2), 2, {}, r"--nnodes 2: nothing says which nodes; name them with --host .* or --hostfile"),
    ],
)
def test_a_number_of_nodes(program: Asked, nodes: int, environ: dict[str, str], expected: dict[str, int] | str | None) -> None:
    """expected: the ranks of the first nodes, or the error."""
    site, request = a_site(**environ), Request(nodes=nodes)
    if isinstance(expected, str):
        with pytest.raises(LaunchError, match=expected):
            planned(program, site=site, request=request)
    else:
        assert where(planned(program, site=site, request=request)) == [expected]


def test_a_number_of_nodes_that_changes_nothing_or_has_no_meaning() -> None:
    site = a_site(**SLURM_3)
    assert planned(one(), site=site, request=Request(nodes=3)).command == planned(one(), site=site).command
    assert where(planned(one(1, "a:2,b:2"), one(1), request=Request(nodes=1))) == [{"a": 1}, {"a": 1}]


# --- binding and output ---


def words(request: Request, mpi: tuple[Mpi, Mpiexec]) -> str:
    command = planned(one(2), mpi=mpi, request=request).command
    return " ".join(command[1 : command.index("-n")])


@ANY
def test_binding_in_the_words_of_the_user(mpi: tuple[Mpi, Mpiexec]) -> None:
    """Each mpiexec has its own units, and says so itself."""
    dashes = "-" if mpi is MPICH else "--"
    assert words(Request(bind_to="socket"), mpi) == f"{dashes}bind-to socket"
    assert words(Request(bind_to="l3cache:2", map_by="numa"), mpi) == f"{dashes}map-by numa {dashes}bind-to l3cache:2"


def test_what_the_user_says_of_binding_replaces_our_default() -> None:
    default = "PRTE_MCA_hwloc_default_binding_policy"
    assert default in planned(one(2)).added
    for request in (Request(bind_to="core"), Request(map_by="numa")):
        assert default not in planned(one(2), request=request).added


def test_intel_mpi_binds_by_a_variable() -> None:
    intel = (Mpi("Intel MPI", (2021, 16), "/i/lib/libmpi.so.12"), Mpiexec("/i/bin/mpiexec", "mpich", (2021, 16)))
    with pytest.raises(LaunchError, match="I_MPI_PIN_DOMAIN"):
        words(Request(bind_to="core"), intel)


def test_two_ways_to_place_ranks_exclude_each_other() -> None:
    with pytest.raises(LaunchError, match="--map-by numa and --nproc-per-node both place the ranks"):
        planned(one(per_node=2), site=a_site(**SLURM_3), request=Request(map_by="numa"))


@ANY
def test_tagged_output(mpi: tuple[Mpi, Mpiexec]) -> None:
    expected = {"mpich": "-prepend-rank", "openmpi": "--output tag" if mpi is OPENMPI else "--tag-output"}
    assert words(Request(tag_output=True), mpi) == expected[mpi[0].family]


@ANY
def test_fault_tolerance_is_refused_where_mpi_ends_the_job(mpi: tuple[Mpi, Mpiexec]) -> None:
    if mpi is OPENMPI:
        assert words(Request(fault_tolerant=True), mpi) == "--with-ft ulfm"
    else:
        with pytest.raises(
            LaunchError, match=r"--fault-tolerant: (MPICH 5\.0\.2|Open MPI 4\.1\.4) ends the job when a rank dies"
        ):
            words(Request(fault_tolerant=True), mpi)
