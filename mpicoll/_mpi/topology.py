"""Which ranks share memory, found once for the world; what holds for a group follows from it without a message."""

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
    """``nodes``: each rank's node, which bears the number of its first rank. ``crowded``: some node has fewer cores for its
    ranks than ranks, so that a rank that spins holds up another."""

    nodes: tuple[int, ...]
    crowded: bool

    def of(self, ranks: Iterable[int]) -> Topology:
        """The same for some of the ranks, in this order; nodes bear the numbers of the group's ranks then."""
        return Topology(_numbered(self.nodes[rank] for rank in ranks), self.crowded)

    @property
    def single(self) -> bool:
        """True if all ranks are on one node."""
        return len(set(self.nodes)) == 1


def discover(comm: Intracomm, node_size: int = 0) -> Topology:
    """The topology of a communicator (collective).

    Args:   node_size: pretends that every so many ranks of a node are one of their own; 0: nodes as they are.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    # No allreduce of objects, which broadcasts: MPICH's ranks of different thread levels disagree about how to, from a
    # communicator's third one on (5.0.2; mpi4py alone shows it).
    here = node.allgather((comm.Get_rank(), _cpus.allowed(), _cpus.quota() or node.Get_size()))
    first = min(rank for rank, _, _ in here)
    crowded = min(len(set().union(*(mine for _, mine, _ in here))), *(quota for _, _, quota in here)) < node.Get_size()
    place = node.Get_rank()
    node.Free()
    known = comm.allgather((first, place // node_size if node_size else 0, crowded))
    nodes = _numbered((its_first, part) for its_first, part, _ in known)
    return Topology(nodes, any(its_crowded for _, _, its_crowded in known))


def _numbered(nodes: Iterable[Hashable]) -> tuple[int, ...]:
    """Each rank's node, however it was named, by the number of its first rank."""
    firsts: dict[Hashable, int] = {}
    return tuple(firsts.setdefault(node, rank) for rank, node in enumerate(nodes))
