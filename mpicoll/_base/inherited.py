"""What the processes that a rank starts inherit in their environment, and what a new MPI job must not inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from mpicoll._base.launcher import TORCHRUN_MARK, detect
from mpicoll._base.torch_variables import PROVIDED, RANK_VARIABLES, set_by_us, unchanged

OWNER = "_MPICOLL_OWNER"  # the rank's process, and the variables that name it: what a rank starts must not become the same rank
SUPERVISOR = "_MPICOLL_SUPERVISOR"  # set by mpicoll.run: how the monitor of a rank reaches it; the program does not see this
ADDED = "_MPICOLL_ADDED"  # set by mpicoll.run for its job, one NAME=VALUE per line: a job started from inside chooses anew

# Variables by which a launcher identifies a process in a running job. A trailing * stands for any ending. Left out: settings of
# the user (OMPI_MCA_btl, OMPI_ALLOW_RUN_AS_ROOT, PMIX_MCA_*, HYDRA_LAUNCHER, I_MPI_FABRICS) and of the allocation (SLURM_JOB_*).
JOB_VARIABLES = (
    "OMPI_COMM_WORLD_*", "OMPI_WORLD_SIZE", "OMPI_WORLD_LOCAL_SIZE", "OMPI_UNIVERSE_SIZE", "OMPI_NUM_APP_CTX",
    "OMPI_FIRST_RANKS", "OMPI_APP_CTX_NUM_PROCS", "OMPI_FILE_LOCATION", "OMPI_COMMAND", "OMPI_ARGV",
    "OMPI_TOOL_NAME", "OMPI_VERSION", "OMPI_LIBDIR_LOC", "OMPI_MCA_PREFIXES", "OMPI_MCA_num_procs",
    "OMPI_MCA_initial_wdir", "OMPI_MCA_cpu_type", "OMPI_MCA_ess*", "OMPI_MCA_orte_*", "OMPI_MCA_pmix",
    "OMPI_MCA_mpi_oversubscribe", "OMPI_MCA_shmem_RUNTIME_QUERY_hint", "OPAL_USER_PARAMS_GIVEN", "PRTE_LAUNCHED",
    "PRTE_SHARED_FS", "PRTE_MCA_ess*", "PRTE_MCA_prte_*", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SIZE", "PMIX_ID",
    "PMIX_SERVER_*", "PMIX_SECURITY_MODE", "PMIX_BFROP_BUFFER_TYPE", "PMIX_GDS_MODULE", "PMIX_PTL_MODULE",
    "PMIX_SYSTEM_TMPDIR", "PMIX_HOSTNAME", "PMIX_VERSION", "PMIX_PARAM_FILE_PASSED", "PMIX_DSTORE_*", "PMI_RANK",
    "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID", "PMI_HOSTNAME", "PMI_SPAWNED", "PMI_JOBID", "PMI_CONTROL_*",
    "PMI_LOCAL_*", "PMI_UNIVERSE_SIZE", "PMI2_*", "HYDI_*", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "MPI_LOCALNRANKS_*", "I_MPI_MPIRUN", "I_MPI_INFO_*", "MV2_COMM_WORLD_*", "MVP_COMM_WORLD_*", "PALS_RANKID",
    "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID", "PALS_APID", "PALS_FD", "PALS_APINFO", "PALS_STARTUP_*",
    "PALS_SPOOL_DIR", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_*", "SLURM_STEPID",
    "SLURM_TASK_PID", "SLURM_GTIDS", "SLURM_SRUN_*", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_PMIX*", "SLURM_PMI_*",
    "SLURM_CPU_BIND*", "SLURM_DISTRIBUTION", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", "JSM_NAMESPACE_*",
)  # fmt: skip


def provide_here(name: str, value: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets a variable for this rank and the programs that it starts; a job that it starts chooses anew."""
    environ[name] = value
    environ[ADDED] = "\n".join(filter(None, (environ.get(ADDED), f"{name}={value}")))


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``environ`` for a new MPI job, also inside a rank of another job. Settings of the user are kept."""
    provided = set_by_us(environ) + unchanged(environ.get(ADDED, "").splitlines(), environ)
    inside = detect(environ) is not None or OWNER in environ
    dropped = {OWNER, PROVIDED, ADDED, SUPERVISOR, *provided}
    if inside or TORCHRUN_MARK in environ:  # this process's rank, which a new job must not take for its own
        dropped.update(RANK_VARIABLES)
    if TORCHRUN_MARK in environ:  # the new ranks are not workers of torchrun and use a store of their own
        dropped.update((TORCHRUN_MARK, "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT"))
    return {name: value for name, value in environ.items() if name not in dropped and not names_job(name)}


def names_job(name: str) -> bool:
    """Whether this variable identifies a process in a running job; see `JOB_VARIABLES`."""
    return any(name.startswith(known[:-1]) if known.endswith("*") else name == known for known in JOB_VARIABLES)
