"""The log line about a new world: where it runs."""

from __future__ import annotations

from mpicoll._base import launcher
from mpicoll._base.log import logger
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime
from mpicoll._mpi.topology import Topology


def world(runtime: Runtime, topology: Topology, devices: str) -> None:
    """Logs one INFO line about the first group that a process makes. ``devices`` says how device memory travels."""
    launch = launcher.detect()
    level = "MULTIPLE" if runtime.thread_level == MPI.THREAD_MULTIPLE else "SERIALIZED"
    vendor, version = MPI.get_vendor()
    ranks, nodes = len(topology.nodes), len(set(topology.nodes))
    logger.info(
        "%s %s, MPI_THREAD_%s; started by %s; %d rank%s on %d node%s%s; %s",
        vendor, ".".join(map(str, version)), level, "no launcher" if launch is None else launch.launcher,
        ranks, "s" * (ranks > 1), nodes, "s" * (nodes > 1), ", more ranks than cores" if topology.crowded else "",
        devices,
    )  # fmt: skip
