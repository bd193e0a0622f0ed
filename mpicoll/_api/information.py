"""What torch.distributed does not tell: info, dump_flight_record, and get_comm, a group's mpi4py communicator."""

from __future__ import annotations

import os
import platform
import socket
import sys
from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

import mpicoll
from mpicoll._api import groups
from mpicoll._base import config, cpus, launcher, probe
from mpicoll._base.errors import MpicollError
from mpicoll._c10d import dynamo
from mpicoll._launch.find import probe_torch
from mpicoll._mpi import runtime

if TYPE_CHECKING:
    from mpi4py import MPI


def info() -> dict[str, Any]:
    """Returns facts about this process, its MPI and its job, as plain values that json can write.

    Any rank may call it at any time (not collective). It starts nothing and communicates with no rank.
    `python -m mpicoll.doctor --json` reports more, and starts processes for that.

    - ``mpicoll``, ``python``: versions.
    - ``torch``: version, cuda, hip, threads, built_with_mpi, entry_point, accelerator, accelerators.
    - ``mpi``: vendor, version, library_version, library_file, mpi4py_version, mpi4py_file, mpi4py_bound; once MPI runs, also
      thread_level, tag_ub, size, processor_name, cuda_query. None before mpi4py.MPI is imported, at the latest by
      init_process_group.
    - ``job``: launcher, rank, size, local_rank, local_size, as the launcher says; None without a launcher.
    - ``host``, ``cores``: the name of this host, and how many of its cores this process may use.
    - ``settings``: the values of the ``MPICOLL_*`` variables that are in force: set, or the default.
    - ``problems``: a sentence for each ``MPICOLL_*`` variable that is unknown or has a value that is not allowed.

    Returns:
        A new dictionary with these keys.

    Example:
        >>> facts = dist.info()
        >>> facts["mpi"]["thread_level"], facts["job"]["size"]
        ('MULTIPLE', 2)
    """
    launch = launcher.detect()
    return {
        "mpicoll": mpicoll.__version__,
        "python": platform.python_version(),
        "torch": probe_torch.facts(),
        "mpi": probe.loaded() if "mpi4py.MPI" in sys.modules else None,
        "job": None if launch is None else launch._asdict(),
        "host": socket.gethostname(),
        "cores": cpus.usable_cores(),
        "settings": config.in_force(os.environ),
        "problems": config.problems(os.environ),
    }


def dump_flight_record(folder: str | os.PathLike[str] | None = None) -> str:
    """Writes which collectives and messages this rank has called last, and where its threads are, as JSON (not collective).

    ``mpicoll doctor dump FOLDER`` compares the ranks' files. Each group keeps its last 2000 collectives. torch.distributed has no
    such function.

    Args:
        folder: Receives ``rank-R.json``, which is overwritten. None: MPICOLL_DUMP_DIR, or ``mpicoll-dump`` in the current
            directory.

    Returns:
        The path of the file.

    Raises:
        MpicollError: There is no process group, or this is a forked child.
        OSError: The file cannot be written.

    Example:
        >>> path = dist.dump_flight_record("flight")
        >>> path.endswith(f"rank-{dist.get_rank()}.json")
        True
    """
    if runtime.in_forked_child():
        raise runtime.forked_error()
    if runtime.current() is None:
        raise MpicollError("dump_flight_record: there is no process group; call init_process_group first")
    from mpicoll._faults.flight_recorder import recorder  # it needs MPI, which `from mpicoll import ...` does not start

    return recorder.dump("dump_flight_record", None if folder is None else os.fspath(folder))


def get_comm(group: ProcessGroup | None = None) -> MPI.Intracomm:
    """Returns an mpi4py communicator of the group's ranks, for MPI calls of the program's own.

    The first call for a group is collective: all its ranks call it, in the same order as their other collectives. Later calls
    return the same communicator and need no other rank. Ranks are numbered as in the group.

    It is a duplicate that mpicoll itself does not use, so that the program's messages and mpicoll's never meet. It ends with the
    group: `destroy_process_group` frees it.

    If MPI runs at MPI_THREAD_SERIALIZED, no asynchronous operation of mpicoll may be under way while the program calls MPI.

    Args:
        group: None means the default group.

    Raises:
        ValueError: This rank is not in the group, the group has another backend or has been destroyed, or there is no default
            group.

    Example:
        >>> comm = dist.get_comm()
        >>> comm.allreduce(comm.Get_rank() + 1)
        3
    """
    communicator = groups.without_torch("get_comm", group)
    if communicator is None:
        raise ValueError("get_comm: this rank is not in the group")
    return communicator.get_comm()  # type: ignore[no-any-return]


dynamo.disable(info)
dynamo.disable(get_comm)
