"""Which launcher started this process, told from the environment alone.

It runs at ``import torch`` through the entry point. Therefore it takes tens of microseconds, and never starts MPI, reads a file,
prints or raises. MPI decides about ranks, and the environment is compared with it in `mpicoll._mpi.runtime`.

    launcher   started by                                   rank, size, local rank and local size come from
    openmpi    mpirun of Open MPI, prterun as ompi          OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    jsm        jsrun of LSF (IBM)                           JSM_NAMESPACE_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    mvapich    mpirun_rsh of MVAPICH2                       MV2_COMM_WORLD_RANK, ...
    pals       PALS (Cray, HPE)                             PALS_RANKID or PMI_RANK, PMI_SIZE, PALS_LOCAL_RANKID, ...
    flux       flux run                                     FLUX_TASK_RANK, FLUX_JOB_SIZE, FLUX_TASK_LOCAL_ID
    hydra      mpiexec of MPICH, Intel MPI, MVAPICH 3 ...   PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS
    slurm      srun, with any --mpi                         SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, ...
    pmix       another PMIx launcher that sets the size     PMIX_RANK, PMIX_SIZE

The first match counts: a rank of Open MPI in a Slurm allocation also sees SLURM_PROCID, which then describes the batch shell.
torchrun is not an MPI launcher; under torchrun alone `detect` returns None.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import NamedTuple, Protocol

from mpicoll._base.slurm import first_host, tasks_per_node

DEFAULT_MASTER_PORT = 29500  # default of torch; used where the launcher sets nothing that is unique to the job
# Below the ephemeral ports of Linux (32768 and up), so that no outgoing connection holds it
FIRST_MASTER_PORT, MASTER_PORTS = 20000, 10000
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm steps from here on are shells (of sbatch, of salloc), not tasks of srun

# Variables of mpicoll that pass from a rank to the processes that it starts:
OWNER = "_MPICOLL_OWNER"  # the rank's process, and the variables that name it: what a rank starts must not become the same rank
PROVIDED = "_MPICOLL_PROVIDED"  # set by provide_torch_variables, "RANK=0 WORLD_SIZE=4": a child may replace these values
SUPERVISOR = "_MPICOLL_SUPERVISOR"  # set by mpicoll.run: how the monitor of a rank reaches it; the program does not see this
ADDED = "_MPICOLL_ADDED"  # set by mpicoll.run for its job, one NAME=VALUE per line: a job started from inside chooses anew

THREADS = "OMP_NUM_THREADS"
THREAD_SETTINGS = (THREADS, "MKL_NUM_THREADS")  # by which a user decides about the threads of torch

TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"  # torchrun sets it in each of its workers; torch's is_torchelastic_launched reads it, too
NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK")  # the number of the node: as torchrun names it, and as Lightning does
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *NODE_VARIABLES)
TORCH_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")

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


class Launch(NamedTuple):
    """Rank and size of this process by its launcher, and its local rank and local size where the launcher sets them."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


class StoreWorld(Protocol):
    """A world of processes that no MPI launcher has started; see `mpicoll._c10d.store_world`."""

    def connect(self, vendor: str) -> None: ...  # sets the variables by which the MPI of this vendor starts as a rank
    def fail(self, why: str, status: int = 1) -> None: ...  # ends this process, and tells the other ranks why
    def end(self) -> None: ...  # takes leave of the other ranks, when the program has come to its end


store_world: StoreWorld | None = None  # the world of this process; None: a launcher started it, or it has none


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The MPI launcher that started this process. None: started by hand, by torchrun, or by the shell of a batch script."""
    for launcher, read in _READERS:
        launch = _launch(launcher, *read(environ))
        if launch is not None:
            return launch
    return None


def started_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an MPI launcher started this process as one of its ranks.

    False under torchrun, also where torchrun itself is a rank or a task of srun (``srun torchrun ...``): its workers inherit the
    variables of the launcher, but torchrun decides how many there are. False in a Slurm step of one task: the shell of
    ``srun --pty bash`` looks the same, and a program started there by hand is not a rank.
    """
    launch = detect(environ)
    return launch is not None and TORCHRUN_MARK not in environ and (launch.launcher, launch.size) != ("slurm", 1)


def if_alone(environ: Mapping[str, str] = os.environ) -> str:
    """For an error about a rank that does not exist: what to type if this process is a world of one; otherwise empty."""
    launch = detect(environ)
    if launch is not None and launch.size > 1:
        return ""
    return "; this process is a world of one: start two ranks, say, by `python -m mpicoll.run -n 2 script.py`"


def provide_torch_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets `TORCH_VARIABLES` where they are unset, as torchrun does.

    Does nothing without an MPI launcher, and never changes a value that the user, torchrun or `mpicoll.run` has set. On several
    hosts MASTER_ADDR stays unset if no scheduler names the first host, and the number of the node if the launcher does not
    give it; init_process_group then learns them through MPI.
    """
    launch = detect(environ)
    if launch is None:
        return
    for name in _provided(environ):  # inherited from a rank that started this process: may be out of date
        del environ[name]
    values = _torch_values(launch, environ)
    environ.pop(PROVIDED, None)
    _provide(values, environ)


def provide_node_rank(node_rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets GROUP_RANK and NODE_RANK where they are unset, to the number of this node as MPI has told it."""
    _provide(dict.fromkeys(NODE_VARIABLES, str(node_rank)), environ)


def provide_here(name: str, value: str, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets a variable for this rank and the programs that it starts; a job that it starts chooses anew."""
    environ[name] = value
    environ[ADDED] = "\n".join(filter(None, (environ.get(ADDED), f"{name}={value}")))


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of ``environ`` for a new MPI job, also inside a rank of another job. Settings of the user are kept."""
    provided = _provided(environ) + _unchanged(environ.get(ADDED, "").splitlines(), environ)
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


# --- the variables of each launcher: rank, size, local rank, local size, as text or None -------------------------------

Words = tuple["str | None", "str | None", "str | None", "str | None"]
NOTHING: Words = (None, None, None, None)


def _family(start: str, environ: Mapping[str, str]) -> Words:
    get = environ.get
    return get(start + "RANK"), get(start + "SIZE"), get(start + "LOCAL_RANK"), get(start + "LOCAL_SIZE")


def _pals(environ: Mapping[str, str]) -> Words:
    get = environ.get
    if "PALS_RANKID" not in environ and "PALS_LOCAL_RANKID" not in environ:
        return NOTHING
    return get("PALS_RANKID", get("PMI_RANK")), get("PMI_SIZE"), get("PALS_LOCAL_RANKID"), get("PALS_LOCAL_SIZE")


def _flux(environ: Mapping[str, str]) -> Words:
    get = environ.get
    if "MPI_LOCALRANKID" in environ:  # mpiexec of MPICH, in a task of flux
        return NOTHING
    size = get("FLUX_JOB_SIZE")
    return get("FLUX_TASK_RANK"), size, get("FLUX_TASK_LOCAL_ID"), size if get("FLUX_JOB_NNODES") == "1" else None


def _hydra(environ: Mapping[str, str]) -> Words:
    get = environ.get
    if "MPI_LOCALRANKID" not in environ and get("SLURM_PROCID") == get("PMI_RANK"):
        return NOTHING  # srun --mpi=pmi2 sets PMI_RANK, too
    return get("PMI_RANK"), get("PMI_SIZE"), get("MPI_LOCALRANKID"), get("MPI_LOCALNRANKS")


def _slurm(environ: Mapping[str, str]) -> Words:
    get = environ.get
    step = _integer(get("SLURM_STEP_ID", get("SLURM_STEPID")))
    # A batch script has SLURM_PROCID=0 and SLURM_NTASKS=N, and is not one of N tasks.
    if step is None or step >= FIRST_SPECIAL_STEP:
        return NOTHING
    tasks, node = tasks_per_node(get("SLURM_STEP_TASKS_PER_NODE", "")), _integer(get("SLURM_NODEID"))
    size = get("SLURM_STEP_NUM_TASKS", get("SLURM_NTASKS", get("SLURM_NPROCS")))
    local_size = str(tasks[node]) if node is not None and node < len(tasks) else None
    return get("SLURM_PROCID"), size, get("SLURM_LOCALID"), local_size


_READERS: tuple[tuple[str, Callable[[Mapping[str, str]], Words]], ...] = (
    ("openmpi", partial(_family, "OMPI_COMM_WORLD_")),  # jsrun sets these, too, for IBM's Spectrum MPI
    ("jsm", partial(_family, "JSM_NAMESPACE_")),
    ("mvapich", partial(_family, "MV2_COMM_WORLD_")),
    ("mvapich", partial(_family, "MVP_COMM_WORLD_")),
    ("pals", _pals),
    ("flux", _flux),  # before hydra, because flux sets PMI_RANK, too
    ("hydra", _hydra),
    ("slurm", _slurm),
    ("pmix", lambda environ: (environ.get("PMIX_RANK"), environ.get("PMIX_SIZE"), None, None)),
)


def _launch(launcher: str, rank: str | None, size: str | None, local_rank: str | None, local_size: str | None) -> Launch | None:
    """A Launch, or None if the words are missing, are not numbers or contradict each other."""
    rank_, size_ = _integer(rank), _integer(size)
    if rank_ is None or size_ is None or rank_ >= size_:
        return None
    return Launch(launcher, rank_, size_, _integer(local_rank), _integer(local_size))


def _integer(word: str | None) -> int | None:
    return int(word) if word is not None and word.isascii() and word.isdigit() else None


# --- torch's variables ------------------------------------------------------------------------------------------------


def _torch_values(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    address = "localhost" if launch.local_size == launch.size else first_host(_nodelist(launch, environ))
    node = _node_rank(launch, environ)
    values = (launch.rank, launch.size, launch.local_rank, launch.local_size, node, node, address, _master_port(environ))
    return {name: str(value) for name, value in zip(TORCH_VARIABLES, values, strict=True) if value is not None}


def _node_rank(launch: Launch, environ: Mapping[str, str]) -> int | None:
    """The number of this node; None: unknown. (Under mpirun, SLURM_NODEID counts the nodes of the step of mpirun's daemons.)"""
    if launch.local_size == launch.size:
        return 0
    return _integer(environ.get({"pals": "PALS_NODEID", "slurm": "SLURM_NODEID"}.get(launch.launcher, "")))


def _nodelist(launch: Launch, environ: Mapping[str, str]) -> str:
    """The host list of Slurm for this job. mpirun in an allocation starts rank 0 on the first host by default."""
    step = environ.get("SLURM_STEP_NODELIST", "") if launch.launcher == "slurm" else ""
    return step or environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", ""))


def _master_port(environ: Mapping[str, str]) -> int:
    """One port for all ranks of this job and, most likely, another port for the next job on this host."""
    job = next(filter(None, map(environ.get, ("PMIX_NAMESPACE", "PALS_APID", "PMI_JOBID", "FLUX_JOB_ID"))), "")
    if not job and "SLURM_JOB_ID" in environ:
        job = environ["SLURM_JOB_ID"] + "." + environ.get("SLURM_STEP_ID", "")
    return FIRST_MASTER_PORT + zlib.crc32(job.encode()) % MASTER_PORTS if job else DEFAULT_MASTER_PORT


def _provide(values: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Sets the variables that are unset, and lists them in `PROVIDED`."""
    new = {name: value for name, value in values.items() if name not in environ}
    environ.update(new)
    listed = [*environ.get(PROVIDED, "").split(), *(f"{name}={value}" for name, value in new.items())]
    if listed:
        environ[PROVIDED] = " ".join(listed)


def _provided(environ: Mapping[str, str]) -> list[str]:
    """The variables that provide_torch_variables set, in this process or a parent, and that have not changed since."""
    return [name for name in _unchanged(environ.get(PROVIDED, "").split(), environ) if name in TORCH_VARIABLES]


def _unchanged(items: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """The names of those NAME=VALUE that are true."""
    return [name for name, _, value in (item.partition("=") for item in items) if environ.get(name) == value]
