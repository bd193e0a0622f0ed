"""Log lines about a new group: where it runs, and the sizes from which its operations take which algorithm."""

from __future__ import annotations

from collections.abc import Mapping

from mpicoll._base import launcher
from mpicoll._base.log import logger
from mpicoll._host.thresholds import NEVER
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


def group(name: str, rank: int, topology: Topology, one_call_below: Mapping[str, int]) -> None:
    """Logs one DEBUG line: the sizes below which an operation is one MPI call."""
    names = {"halves": "all_reduce of halves"}
    sizes = {names.get(operation, operation): nbytes for operation, nbytes in one_call_below.items() if nbytes < NEVER}
    from_sizes = ", ".join(f"{operation} {nbytes}" for operation, nbytes in sizes.items())
    apart = len(set(topology.nodes)) == len(topology.nodes)
    several = "messages, reduced by torch," if apart else "shared memory in each node and MPI between them"
    larger = "shared memory" if topology.single else several
    text = f"one MPI call below so many bytes, {larger} from there on: {from_sizes}" if from_sizes else "MPI carries everything"
    logger.debug("group %r (rank %d of %d): %s", name, rank, len(topology.nodes), text)
