"""Ranks in containers of their own, of which MPI believes that they share memory; the settings that keep MPI from trying.

# Note [A container for each rank]
`mpiexec -n 2 docker run ... python train.py` puts each rank of a host into a container. The launcher says that the ranks are on
one host, so MPI sends through shared memory. It finds the memory by a file in /dev/shm and by the number of the other process.
With the defaults of docker neither is common. Two ranks, measured with namespaces:

    own to each rank            Open MPI 5.0.11                            MPICH 5.0.2
    /dev/shm                    TCP, after a warning                       MPI_Init hangs
    process numbers             segmentation fault: both have number 1,    large messages end the job: process_vm_readv
                                so each takes the memory for its own
    both                        segmentation fault                         MPI_Init hangs

So `prepare` tells MPI, before it starts, to send between these ranks as between hosts. This is right and slower. Containers that
share both (docker --ipc=host --pid=host, the defaults of Apptainer) keep shared memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from functools import cache

from mpicoll._base import cpus, processes
from mpicoll._base.launcher import Launch

# The processes of a launcher that a rank starts are other ranks, even with the same variables (_mpi/second_process.py).
LAUNCHER_PROGRAMS = {
    "mpirun", "mpiexec", "mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr", "prterun", "prte", "prted", "orterun", "orted",
    "srun", "slurmstepd", "palsd", "flux", "flux-shell", "mpirun_rsh", "mpispawn",
}  # fmt: skip

PROCESSES, SHARED_MEMORY = "process numbers", "/dev/shm"
INITIAL_NAMESPACE = 0xEFFFFFFC  # inode of the host's own namespace of process numbers (PROC_PID_INIT_INO of Linux)

TRANSPORTS = "OMPI_MCA_btl"  # Open MPI; "^a,b": all but these
BY_SHARED_MEMORY = ("sm", "vader")  # in Open MPI 5 and 4
OTHER_SETTINGS = {"MPIR_CVAR_NOLOCAL": "1", "I_MPI_FABRICS": "ofi"}  # MPICH; Intel MPI


def prepare(environ: MutableMapping[str, str], launch: Launch | None) -> None:
    """Sets what MPI needs before it starts, in a rank that shares too little with the others. Values of the user stay."""
    if apart(environ, launch) is None:
        return
    transports = environ.get(TRANSPORTS, "^")
    if transports.startswith("^"):
        names = [name for name in transports[1:].split(",") if name]
        environ[TRANSPORTS] = "^" + ",".join(dict.fromkeys((*names, *BY_SHARED_MEMORY)))
    for name, value in OTHER_SETTINGS.items():
        environ.setdefault(name, value)


def apart(environ: Mapping[str, str], launch: Launch | None) -> str | None:
    """What this rank's container does not share with the ranks of its host: PROCESSES, SHARED_MEMORY; None: nothing is known.

    `detect` knows no rank under ``mpiexec -pmi-port`` of MPICH, which containers need: PMI tells the rank when MPI starts.
    """
    alone = "PMI_PORT" not in environ if launch is None else launch.local_size == 1
    return None if alone else _not_shared()


@cache
def _not_shared() -> str | None:
    """Compares with the launcher of this host. A launcher inside the container has started all ranks there."""
    launchers = _launchers()
    if not launchers:
        return PROCESSES if processes.namespace("pid") not in (0, INITIAL_NAMESPACE) else None
    own = _shared_memory("self")
    others = {_shared_memory(pid) for pid in launchers} - {None}
    return SHARED_MEMORY if others and own not in others else None


def _launchers() -> list[int]:
    """The launcher among this process's ancestors, or all that it sees: a daemon that starts containers is no launcher."""
    pid = os.getpid()
    while (pid := processes.parent(pid)) > 0:
        if is_launcher(pid):
            return [pid]
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and is_launcher(int(name))]


def is_launcher(pid: int) -> bool:
    """Whether the process is one of a launcher. False if it has ended, or the system does not tell."""
    return cpus.read(f"/proc/{pid}/comm") in LAUNCHER_PROGRAMS


def _shared_memory(process: int | str) -> tuple[int, int] | None:
    """Identifies /dev/shm as a process sees it; None: the process has none, or another user's (slurmstepd)."""
    try:
        folder = os.stat(f"/proc/{process}/root{SHARED_MEMORY}")
    except OSError:
        return None
    return folder.st_dev, folder.st_ino


def advice(environ: Mapping[str, str], launch: Launch | None) -> tuple[str, str] | None:
    """For the doctor: what is wrong, and the remedy. None: nothing."""
    what = apart(environ, launch)
    if what is None:
        return None
    text = f"this rank is in a container with {what} of its own: ranks of this host talk over the network, not by shared memory"
    return text, "docker --ipc=host --pid=host; apptainer without --pid and --contain"
