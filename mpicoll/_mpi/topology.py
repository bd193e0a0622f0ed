"""Which ranks share memory. Found once for the world; the topology of a group follows from it without a message."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpicoll import _cpus
from mpicoll._mpi import survivors
from mpicoll._mpi.library import MPI

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

Facts = tuple[int, set[int], int | None]  # a rank, the cores that it may use, and their number if that is limited


@dataclass(frozen=True)
class Topology:
    """The nodes of a group's ranks."""

    nodes: tuple[int, ...]  # each rank's node, named by the number of the node's first rank
    crowded: bool  # some node has fewer cores for its ranks than ranks, so that a spinning rank holds up another
    share: int = 1  # this rank's part of the cores that it shares with the other ranks of the world on its node

    def of(self, ranks: Iterable[int]) -> Topology:
        """The topology of a group of some of the ranks, in this order. Its nodes are named by ranks of the group."""
        return Topology(_numbered(self.nodes[rank] for rank in ranks), self.crowded, self.share)

    @property
    def single(self) -> bool:
        """True if all ranks are on one node."""
        return len(set(self.nodes)) == 1


def discover(comm: Intracomm, node_size: int = 0) -> Topology:
    """The topology of a communicator (collective).

    Every ``node_size`` ranks of a node count as a node of their own; 0: nodes as they are.
    """
    own = comm.Get_rank(), _cpus.allowed(), _cpus.quota()
    neighbours = _neighbours_by_name(comm, own) if survivors.possible() else _neighbours(comm, own)
    first, local_rank = neighbours[0][0], neighbours.index(own)
    cores = set().union(*(allowed for _, allowed, _ in neighbours))
    crowded = min(len(cores), *(quota or len(neighbours) for _, _, quota in neighbours)) < len(neighbours)
    ranks = comm.allgather((first, local_rank // node_size if node_size else 0, crowded))
    nodes = _numbered((node_first, part) for node_first, part, _ in ranks)
    return Topology(nodes, any(crowded for _, _, crowded in ranks), _share(own, neighbours))


def _share(own: Facts, neighbours: Iterable[Facts]) -> int:
    """This rank's part of its cores, of which other ranks of the node may use some, too."""
    _, allowed, quota = own
    sharing = sum(not allowed.isdisjoint(other) for _, other, _ in neighbours)
    cores = _cpus.count(allowed)
    return max(1, min(cores, quota or cores) // sharing)


def _neighbours(comm: Intracomm, own: Facts) -> list[Facts]:
    """Returns what the ranks of this node have handed over, in their order (collective)."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    # Not allreduce of objects, which broadcasts: in MPICH, ranks of different thread levels disagree about how to broadcast, from
    # the third broadcast of a communicator on (5.0.2; mpi4py alone shows it).
    found = node.allgather(own)
    node.Free()
    return found


def _neighbours_by_name(comm: Intracomm, own: Facts) -> list[Facts]:
    """The same without another communicator; see Note [A death while communicators are made] in survivors.py."""
    host = socket.gethostname()
    return [facts for name, facts in comm.allgather((host, own)) if name == host]


def _numbered(nodes: Iterable[Hashable]) -> tuple[int, ...]:
    """Names each rank's node by the number of the node's first rank."""
    firsts: dict[Hashable, int] = {}
    return tuple(firsts.setdefault(node, rank) for rank, node in enumerate(nodes))
