"""What a launch adds to the environment, where it applies and the user has not set something else. Pure.

    Open MPI, uid 0                  OMPI_ALLOW_RUN_AS_ROOT, ..._CONFIRM   it refuses root, e.g. in a container
    Open MPI                         binding policy none                   Note [Why no binding]
    Open MPI, more ranks than cores, oversubscribe, yield_when_idle        it refuses, and waiting ranks would block others
        or --oversubscribe
    Open MPI, more ranks than slots  oversubscribe                         it refuses, e.g. PBS jobs without mpiprocs
    Open MPI                         settings of the ranks                 mpicoll._base.open_mpi_settings
    Open MPI 5, several hosts        oob_tcp_keepalive_*                   notices a host that is gone after 11 s, not never
    MPICH in a Slurm allocation      SLURM_MPI_TYPE=none                   Hydra's own srun must not start PMI for it
    in a task of srun                SLURM_OVERLAP=1                       an srun of mpiexec would wait for that task's CPUs
    another launcher                 of these, what ranks of Open MPI need
    all                              MASTER_ADDR, MASTER_PORT              the first host, and a port that is free here
    more than one rank on a host     OMP_NUM_THREADS                       see `thread_count`

More ranks than cores: by the allocation, or by this host if all ranks are here. Of other hosts nothing is known; their ranks
choose OMP_NUM_THREADS (`mpicoll._launch.rank`) and yield_when_idle (`mpicoll._base.binding`) when they start.

# Note [Why no binding]
Open MPI binds each rank to one core if a job has one or two ranks. The threads of torch and the communication thread of mpicoll
then share that core: a small message takes 20 ms instead of 0.01. A binding that the user sets, by --bind-to or in the
environment, stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpicoll._base import open_mpi_settings
from mpicoll._base.slurm import allocated_cpus
from mpicoll._launch.find.installations import Mpi
from mpicoll._launch.job import KEEPALIVE, Request, Site, Where

# Settings by which the user may have chosen a binding: then no binding is added.
BINDING_SETTINGS = (
    "PRTE_MCA_hwloc_default_binding_policy",
    "OMPI_MCA_hwloc_base_binding_policy",
    "OMPI_MCA_rmaps_base_mapping_policy",
)
BINDING_OPTIONS = ("--bind-to", "--map-by", "--rankfile", "--cpu-set", "--cpus-per-rank")


def additions(
    where: Where, mpi: Mpi, site: Site, request: Request, notes: list[str], extra: Sequence[str] | None
) -> dict[str, str]:
    """The variables to add.

    Args:
        notes: Sentences for the user, to which those about threads are appended.
        extra: Words for mpiexec, among which may be options about binding; None: another launcher starts the ranks.
    """
    added: dict[str, str] = {}
    if extra is None:
        _add_open_mpi_settings(added, where, mpi, site)
    else:
        _add_settings(added, where, mpi, site, extra, request.oversubscribe)
    _add_torch_variables(added, where, site, notes)
    if site.in_step and not site.decided("SLURM_OVERLAP"):
        added["SLURM_OVERLAP"] = "1"
    if request.max_restarts is not None:
        added["TORCHELASTIC_RESTART_COUNT"] = str(request.restart)
        added["TORCHELASTIC_MAX_RESTARTS"] = str(request.max_restarts)
    return added


def _add_settings(added: dict[str, str], where: Where, mpi: Mpi, site: Site, extra: Sequence[str], oversubscribe: bool) -> None:
    def add(name: str, value: str) -> None:
        if not site.decided(name):
            added[name] = value

    if mpi.family == "mpich":
        if "SLURM_JOB_ID" in site.environ:
            add("SLURM_MPI_TYPE", "none")
        return
    prrte = mpi.vendor == "Open MPI" and mpi.version[:1] >= (5,)  # from 5 on PRRTE starts the ranks; it has settings of its own
    if site.uid == 0:
        add("OMPI_ALLOW_RUN_AS_ROOT", "1")
        add("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    cores = _cores(where, site)
    crowded = oversubscribe or (where.ranks_here > site.cores if cores is None else where.ranks_per_host > cores)
    if crowded or _more_than_slots(where, site):
        if prrte:  # by slot: otherwise PRRTE of Open MPI 5.0.11 starts all ranks on the first host, also with --host a:2,b:2
            add("PRTE_MCA_rmaps_default_mapping_policy", "slot:oversubscribe")
        else:
            add("OMPI_MCA_rmaps_base_oversubscribe", "1")
    if crowded:
        add("OMPI_MCA_mpi_yield_when_idle", "1")
    if not any(site.decided(name) for name in BINDING_SETTINGS) and not any(word.startswith(BINDING_OPTIONS) for word in extra):
        add(BINDING_SETTINGS[0] if prrte else BINDING_SETTINGS[1], "none")
    if prrte and where.several_hosts:
        for name, number in KEEPALIVE.items():
            add(f"PRTE_MCA_oob_tcp_keepalive_{name}", str(number))
    _add_open_mpi_settings(added, where, mpi, site)


def _add_open_mpi_settings(added: dict[str, str], where: Where, mpi: Mpi, site: Site) -> None:
    """The settings for ranks of Open MPI under any launcher."""
    if mpi.family != "openmpi":
        return
    settings = dict(open_mpi_settings.ALWAYS)
    if mpi.vendor == "Open MPI":
        settings |= open_mpi_settings.of_version(mpi.version, one_host=not where.several_hosts)
    added.update({name: value for name, value in settings.items() if not site.decided(name)})


def _more_than_slots(where: Where, site: Site) -> bool:
    """Whether a node has fewer slots than ranks. An Open MPI that reads the allocation itself refuses that."""
    allocation = None if site.reads_allocation else site.allocation
    return allocation is not None and where.ranks_per_host > min(slots for _, slots in allocation.nodes)


def _add_torch_variables(added: dict[str, str], where: Where, site: Site, notes: list[str]) -> None:
    if "MASTER_ADDR" not in site.environ and where.first_host:
        added["MASTER_ADDR"] = where.first_host
    if "MASTER_PORT" not in site.environ:
        added["MASTER_PORT"] = str(site.free_port())
    if "OMP_NUM_THREADS" not in site.environ and where.ranks_per_host > 1:
        threads, why = thread_count(where, site)
        if threads is not None:
            added["OMP_NUM_THREADS"] = str(threads)
        notes.append(
            f"OMP_NUM_THREADS{'' if threads is None else f'={threads}'} for each rank: {why} (set it yourself for another number)"
        )


def thread_count(where: Where, site: Site) -> tuple[int | None, str]:
    """Threads of one rank, and why; None: the ranks choose when they start.

    As in torchrun, they are set only if OMP_NUM_THREADS is unset and a host has more than one rank: otherwise torch would start
    as many threads as there are cores in every rank. torchrun sets 1, which leaves cores idle. Here the ranks share the cores,
    and get 1 only if there are not more cores than ranks.
    """
    per_task = site.environ.get("SLURM_CPUS_PER_TASK", "")
    if per_task.isdigit() and int(per_task) > 0:
        return int(per_task), f"Slurm gives each task {per_task} CPUs"
    cores = _cores(where, site)
    if cores is None:
        return None, f"its share of the cores of its host, which has up to {where.ranks_per_host} ranks"
    place = "on each host" if where.several_hosts else "here"
    return max(1, cores // where.ranks_per_host), f"{cores} usable cores {place}, {where.ranks_per_host} ranks on a host"


def _cores(where: Where, site: Site) -> int | None:
    """Number of cores that the job has on each of its hosts, the smallest one; None: of some host it is not known."""
    allocated = allocated_cpus(site.environ)
    known = [min(site.cores, allocated.get(host, site.cores)) for host in where.hosts if site.is_here(host)]
    known += [allocated[host] for host in where.hosts if host in allocated and not site.is_here(host)]
    if len(known) < len(where.hosts):
        return None
    return min(known, default=site.cores)
