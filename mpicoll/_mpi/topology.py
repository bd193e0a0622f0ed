"""Which ranks share memory. Found once for the world; the topology of a group follows from it without a message."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpicoll import _cpus
from mpicoll._mpi.library import MPI

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


@dataclass(frozen=True)
class Topology:
    """The nodes of a group's ranks."""

    nodes: tuple[int, ...]  # each rank's node, named by the number of the node's first rank
    crowded: bool  # some node has fewer cores for its ranks than ranks, so that a spinning rank holds up another

    def of(self, ranks: Iterable[int]) -> Topology:
        """The topology of a group of some of the ranks, in this order. Its nodes are named by ranks of the group."""
        return Topology(_numbered(self.nodes[rank] for rank in ranks), self.crowded)

    @property
    def single(self) -> bool:
        """True if all ranks are on one node."""
        return len(set(self.nodes)) == 1


def discover(comm: Intracomm, node_size: int = 0) -> Topology:
    """The topology of a communicator (collective).

    Every ``node_size`` ranks of a node count as a node of their own; 0: nodes as they are.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    # Not allreduce of objects, which broadcasts: in MPICH, ranks of different thread levels disagree about how to broadcast, from
    # the third broadcast of a communicator on (5.0.2; mpi4py alone shows it).
    neighbours = node.allgather((comm.Get_rank(), _cpus.allowed(), _cpus.quota() or node.Get_size()))
    first = min(rank for rank, _, _ in neighbours)
    cores = set().union(*(allowed for _, allowed, _ in neighbours))
    crowded = min(len(cores), *(quota for _, _, quota in neighbours)) < node.Get_size()
    local_rank = node.Get_rank()
    node.Free()
    ranks = comm.allgather((first, local_rank // node_size if node_size else 0, crowded))
    return Topology(_numbered((node_first, part) for node_first, part, _ in ranks), any(crowded for _, _, crowded in ranks))


def _numbered(nodes: Iterable[Hashable]) -> tuple[int, ...]:
    """Names each rank's node by the number of the node's first rank."""
    firsts: dict[Hashable, int] = {}
    return tuple(firsts.setdefault(node, rank) for rank, node in enumerate(nodes))
