"""What a launch adds to the environment, where it applies and the user has not set something else. Pure.

    Open MPI, uid 0                  OMPI_ALLOW_RUN_AS_ROOT, ..._CONFIRM   it refuses root, e.g. in a container
    Open MPI                         binding policy none                   Note [Why no binding]
    Open MPI                         oversubscribe                         it refuses more ranks than cores or slots
    Open MPI 5, several hosts        oob_tcp_keepalive_*                   notices a host that is gone after 11 s, not never
    MPICH in a Slurm allocation      SLURM_MPI_TYPE=none, always           Hydra's srun must not start PMI; sites set pmix
    in a task of srun                SLURM_OVERLAP=1                       an srun of mpiexec would wait for that task's CPUs
    all                              MASTER_ADDR, MASTER_PORT              the first host, and a port that is free here

What a rank itself reads, it sets when it starts, under any launcher: `mpicoll._base.open_mpi_settings`, `mpicoll._base.binding`.

# Note [Always oversubscribe]
Open MPI 5.0.11 lets its ranks yield their cores where there are more ranks than cores, and only there, whether this is allowed or
not (on 2 cores 1 and 2 ranks do not yield, 4 do). So it costs nothing where it is not needed. The ranks are placed by slot:
with the modifier alone, Open MPI 5.0.11 starts all of them on the first host, also with --host a:2,b:2. If the user
binds ranks, Open MPI places them by its own default: it spreads them over the sockets.

# Note [Why no binding]
Open MPI binds each rank to one core if a job has one or two ranks. The threads of torch and the communication thread of mpicoll
then share that core: a small message takes 20 ms instead of 0.01. A binding that the user sets, by --bind-to or in the
environment, stays.
"""

from __future__ import annotations

from mpicoll._launch.job import Job
from mpicoll._launch.linux import KEEPALIVE

# Settings by which the user may have chosen a binding: then no binding is added.
BINDING_SETTINGS = (
    "PRTE_MCA_hwloc_default_binding_policy",
    "OMPI_MCA_hwloc_base_binding_policy",
    "OMPI_MCA_rmaps_base_mapping_policy",
)
BINDING_OPTIONS = ("--bind-to", "--map-by", "--rankfile", "--cpu-set", "--cpus-per-rank")


def additions(job: Job) -> dict[str, str]:
    """The variables to add."""
    where, mpi, site, wanted = job.where, job.mpi, job.site, dict[str, str]()
    if mpi.family == "openmpi":
        wanted |= _for_mpirun(job)
    elif "SLURM_JOB_ID" in site.environ:
        wanted["SLURM_MPI_TYPE"] = "none"
    wanted["MASTER_ADDR"] = where.first_host
    wanted |= {} if site.decided("MASTER_PORT") else {"MASTER_PORT": str(site.free_port())}
    if site.in_step:
        wanted["SLURM_OVERLAP"] = "1"
    added = {name: value for name, value in wanted.items() if name == "SLURM_MPI_TYPE" or not site.decided(name)}
    if job.request.max_restarts is not None:
        added["TORCHELASTIC_RESTART_COUNT"] = str(job.request.restart)
        added["TORCHELASTIC_MAX_RESTARTS"] = str(job.request.max_restarts)
    return added


def _for_mpirun(job: Job) -> dict[str, str]:
    """The settings for the mpiexec of Open MPI itself."""
    mpi, site, request, wanted = job.mpi, job.site, job.request, dict[str, str]()
    prrte = mpi.vendor == "Open MPI" and mpi.version[:1] >= (5,)  # from 5 on PRRTE starts the ranks; it has settings of its own
    if site.uid == 0:
        wanted |= dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    if request.bind_to in (None, "none"):  # Note [Always oversubscribe]
        policy = {"PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe"}
        wanted |= policy if prrte else {"OMPI_MCA_rmaps_base_oversubscribe": "1"}
    binding = request.bind_to is not None or request.map_by is not None or any(map(site.decided, BINDING_SETTINGS))
    if not binding and not any(word.startswith(BINDING_OPTIONS) for word in request.mpiexec_args):
        wanted[BINDING_SETTINGS[0] if prrte else BINDING_SETTINGS[1]] = "none"
    if prrte and job.where.several_hosts:
        wanted |= {f"PRTE_MCA_oob_tcp_keepalive_{name}": str(number) for name, number in KEEPALIVE.items()}
    return wanted
