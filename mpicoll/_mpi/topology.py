"""Which ranks share memory. Found once for the world; the topology of a group follows from it without a message."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpicoll._base import cpus
from mpicoll._mpi import survivors
from mpicoll._mpi.library import MPI

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


class Facts(NamedTuple):
    """What a rank knows of itself.

    Attributes:
        node: Equal on ranks that share memory.
        cores: The hardware threads that it may use, one bit each.
        quota: Number of cores, if that is limited.
    """

    node: Hashable
    cores: int
    quota: int | None


class Topology(NamedTuple):
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


def own_facts(comm: Intracomm) -> Facts:
    """The facts about this rank of a communicator (collective)."""
    node = socket.gethostname() if survivors.possible() else _first_of_node(comm)
    return Facts(node, sum(1 << core for core in cpus.allowed()), cpus.quota())


def topology_of(ranks: Sequence[Facts], own: int, node_size: int = 0) -> Topology:
    """The topology of a communicator as rank ``own`` sees it, from the facts about its ranks.

    Every ``node_size`` ranks of a node count as a node of their own; 0: nodes as they are.
    """
    on_node: dict[Hashable, list[Facts]] = {}
    names: list[Hashable] = []
    for each in ranks:
        neighbours = on_node.setdefault(each.node, [])
        names.append((each.node, len(neighbours) // node_size if node_size else 0))
        neighbours.append(each)
    crowded = any(_crowded(neighbours) for neighbours in on_node.values())
    return Topology(_numbered(names), crowded, _share(ranks[own], on_node[ranks[own].node]))


def _crowded(node: Sequence[Facts]) -> bool:
    cores = 0
    for each in node:
        cores |= each.cores
    return min(cores.bit_count(), *(each.quota or len(node) for each in node)) < len(node)


def _share(own: Facts, node: Iterable[Facts]) -> int:
    """This rank's part of its cores, of which other ranks of the node may use some, too."""
    sharing = sum(bool(own.cores & other.cores) for other in node)
    cores = cpus.count(cpus.allowed())
    return max(1, min(cores, own.quota or cores) // sharing)


def _first_of_node(comm: Intracomm) -> int:
    """The first of the ranks that share this rank's memory.

    Not by host name, which containers of a host may share; but see Note [A death while communicators are made] in survivors.py.
    """
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    members, world = node.Get_group(), comm.Get_group()
    first: int = members.Translate_ranks([0], world)[0]
    for each in (members, world, node):
        each.Free()
    return first


def _numbered(nodes: Iterable[Hashable]) -> tuple[int, ...]:
    """Names each rank's node by the number of the node's first rank."""
    firsts: dict[Hashable, int] = {}
    return tuple(firsts.setdefault(node, rank) for rank, node in enumerate(nodes))
