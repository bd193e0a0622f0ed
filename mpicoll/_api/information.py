"""info: what runs here, for a program that prints or records it."""

from __future__ import annotations

import os
import platform
import socket
import sys
from typing import Any

import mpicoll
from mpicoll._base import config, cpus, launcher, probe
from mpicoll._c10d import dynamo
from mpicoll._launch.find import probe_torch


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
        "job": None if launch is None else vars(launch).copy(),
        "host": socket.gethostname(),
        "cores": cpus.usable_cores(),
        "settings": config.in_force(os.environ),
        "problems": config.problems(os.environ),
    }


dynamo.disable(info)
