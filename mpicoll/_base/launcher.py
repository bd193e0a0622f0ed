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
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from mpicoll._base.slurm import tasks_per_node

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm steps from here on are shells (of sbatch, of salloc), not tasks of srun

TORCHRUN_MARK = "TORCHELASTIC_RUN_ID"  # torchrun sets it in each of its workers; torch's is_torchelastic_launched reads it, too


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
    step = integer(get("SLURM_STEP_ID", get("SLURM_STEPID")))
    # A batch script has SLURM_PROCID=0 and SLURM_NTASKS=N, and is not one of N tasks.
    if step is None or step >= FIRST_SPECIAL_STEP:
        return NOTHING
    tasks, node = tasks_per_node(get("SLURM_STEP_TASKS_PER_NODE", "")), integer(get("SLURM_NODEID"))
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
    rank_, size_ = integer(rank), integer(size)
    if rank_ is None or size_ is None or rank_ >= size_:
        return None
    return Launch(launcher, rank_, size_, integer(local_rank), integer(local_size))


def integer(word: str | None) -> int | None:
    return int(word) if word is not None and word.isascii() and word.isdigit() else None
