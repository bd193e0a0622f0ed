"""Ranks that are bound to one core each: the setting that they need, and advice for the user.

# Note [One core for a rank]
mpirun of Open MPI binds each rank to a core if a job has one or two ranks; other launchers do it on request. mpicoll has
threads of its own (asynchronous collectives, messages, RPC). Open MPI waits in a loop that keeps the core, so a thread that
waits inside MPI blocks the other threads until the scheduler takes the core away. Mean time of an 8-byte operation (us) beside
one asynchronous all_reduce, two ranks on 2 cores of a busy machine, Open MPI 5.0.11:

    setting                     send + recv    isend + irecv + wait    all_reduce    all_reduce asynchronous
    --bind-to core (default)    1400 - 13000             210 - 220   1100 - 6200              4300 - 18000
    --bind-to none              2800 - 23000             110 - 720    700 - 8700              2700 - 14000
    default, mpi_yield_when_idle=1 100 - 150               40 - 60      80 - 120                    90
    MPICH, bound                          40                   110            30                   240

Without a free core --bind-to none does not help; yielding the core does. If no other thread waits, an operation takes the same
time with and without yielding (all_reduce 6 - 7 us, send + recv 11 us, median). mpicoll therefore sets mpi_yield_when_idle
before MPI starts, in ranks that may use one core only, and on hosts with fewer cores than ranks.

# Note [Why the affinity mask stays]
A process can widen its own mask, but it cannot know whether it may: the environment of a rank is the same with and without
`--bind-to core`. torch starts as many threads as the mask had cores at its import, so a wider mask would not make it faster.
Where cores are left over, only a new launch helps; `advice` tells the user."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from mpicoll._base import cpus, last_words
from mpicoll._base.launcher import Launch
from mpicoll._base.slurm import cpus_per_task

THREADS = "OMP_NUM_THREADS"
THREAD_SETTINGS = (THREADS, "MKL_NUM_THREADS")  # by which a user decides about the threads of torch
YIELD_SETTING = "OMPI_MCA_mpi_yield_when_idle"  # 1: Open MPI yields its core while it waits


def is_bound(mask: set[int]) -> bool:
    """Whether a process with this affinity mask has one core for all its threads."""
    return cpus.count(mask) == 1


def prepare(environ: MutableMapping[str, str], mask: set[int], launch: Launch | None = None) -> None:
    """Sets `YIELD_SETTING` before MPI starts, for a rank that is known to have no core of its own. A value of the user stays."""
    ranks = 0 if launch is None else launch.local_size or 0
    if is_bound(mask) or (launch is not None and ranks > (cores_for_ranks(launch, environ) or cpus.count(mask))):
        environ.setdefault(YIELD_SETTING, "1")


def threads(environ: Mapping[str, str], mask: set[int], launch: Launch | None) -> int | None:
    """This rank's share of the cores of its host, before MPI starts; None: it has no neighbours, or their number is unknown."""
    if launch is None or launch.local_size is None or launch.local_size == 1:
        return None
    if (per_task := cpus_per_task(environ)) is not None:
        return per_task
    cores = cpus.count(mask)
    available = cores_for_ranks(launch, environ) or cores
    return min(cores, share(min(available, cpus.quota() or available), launch.local_size))


def share(cores: int, ranks: int) -> int:
    """Threads of each of the ranks that share these cores. (torchrun sets 1, which leaves cores idle if there are more.)"""
    return max(1, cores // ranks)


def cores_for_ranks(launch: Launch, environ: Mapping[str, str]) -> int | None:
    """Number of cores of the launcher for its ranks on this host; None: unknown."""
    if launch.launcher == "slurm":  # the mask of slurmstepd covers the whole host
        number = environ.get("SLURM_CPUS_ON_NODE", "")
        return int(number) if number.isdigit() else None
    mask = cpus.allowed_for(last_words.launcher_pid())
    return cpus.count(mask) or None


def advice(launch: Launch | None, mask: set[int], available: int | None, waits_busily: bool) -> str | None:
    """One sentence for a user whose ranks are bound to one core each; None: no advice is needed.

    Args:
        launch: From the environment.
        mask: This rank's affinity mask.
        available: `cores_for_ranks`.
        waits_busily: Open MPI has started without `YIELD_SETTING`.
    """
    if launch is None or launch.size == 1 or not is_bound(mask):
        return None
    openmp = next((name for name in ("OMP_PLACES", "OMP_PROC_BIND") if name in os.environ), None)
    by = launch.launcher if openmp is None else f"OpenMP ({openmp})"  # libgomp binds the thread that imports torch
    bound = f"{by} has bound this rank to one core (CPU {min(mask)})"
    left_over = available is not None and launch.local_size is not None and available > launch.local_size
    remedies = [remedy(launch, available) if openmp is None else f"no {openmp}"] if left_over else []
    if waits_busily:
        remedies.append(f"{YIELD_SETTING}=1 in the environment (or `import mpicoll` before mpi4py.MPI, which sets it)")
        cost = "Open MPI keeps the core while it waits: beside an asynchronous operation a message can take 20 ms"
    elif left_over:
        cost = (
            f"its threads share that core, though {available} are there for {launch.local_size} ranks on this host: torch "
            "computes on one, and asynchronous operations do not overlap with computation"
        )
    else:
        return None
    return f"{bound}; {cost}. Use {', or '.join(remedies)}"


def remedy(launch: Launch, available: int | None) -> str:
    """The option of this launcher that gives its ranks more than one core."""
    remedies = {
        "slurm": f"`srun --cpus-per-task={max(2, share(available or 0, launch.local_size or 1))}`",
        "openmpi": "`mpirun --bind-to none` (`python -m mpicoll.run` does that)",
        "hydra": "`mpiexec -bind-to none` (Intel MPI: I_MPI_PIN=off)",
    }
    return remedies.get(launch.launcher, "the option by which this launcher binds ranks to more cores, or to none")
