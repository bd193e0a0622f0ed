"""Which ranks share memory. Found once for the world; the topology of a group follows from it without a message."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpicoll._base import cpus, launcher
from mpicoll._base.log import logger
from mpicoll._mpi import survivors
from mpicoll._mpi.library import MPI

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from mpicoll._mpi.runtime import Runtime


class Facts(NamedTuple):
    """What a rank knows of itself.

    Attributes:
        node: Equal on ranks that share memory.
        cpus: The hardware threads that it may use, one bit each.
        cores: Number of their cores.
        quota: Number of cores, if that is limited.
        threads: Number of threads of torch; 0: as many as its share of the cores.
    """

    node: Hashable
    cpus: int
    cores: int
    quota: int | None
    threads: int


class Topology(NamedTuple):
    """The nodes of a group's ranks."""

    nodes: tuple[int, ...]  # each rank's node, named by the number of the node's first rank
    crowded: bool  # some node has fewer cores for its ranks than ranks, so that a spinning rank holds up another
    share: int = 1  # this rank's part of the cores that it shares with the other ranks of the world on its node
    threads: int = 1  # of torch in each rank of the world, the fewest; 1 if some node has fewer cores than threads of its ranks

    def of(self, ranks: Iterable[int]) -> Topology:
        """The topology of a group of some of the ranks, in this order. Its nodes are named by ranks of the group."""
        return Topology(_numbered(self.nodes[rank] for rank in ranks), self.crowded, self.share, self.threads)

    @property
    def single(self) -> bool:
        """True if all ranks are on one node."""
        return len(set(self.nodes)) == 1


def own_facts(comm: Intracomm, threads: int) -> Facts:
    """The facts about this rank of a communicator (collective)."""
    node = socket.gethostname() if survivors.possible() else _first_of_node(comm)
    allowed = cpus.allowed()
    return Facts(node, sum(1 << cpu for cpu in allowed), cpus.count(allowed), cpus.quota(), threads)


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
    crowded = any(_usable(neighbours) < len(neighbours) for neighbours in on_node.values())
    threads = min(map(_threads, on_node.values()))
    return Topology(_numbered(names), crowded, _share(ranks[own], on_node[ranks[own].node]), threads)


def _usable(node: Sequence[Facts], per_core: int = 1) -> int:
    """Number of hardware threads that the ranks of a node may use, or of cores with ``per_core`` of them."""
    mask = 0
    for each in node:
        mask |= each.cpus
    return min([mask.bit_count() // per_core, *(each.quota for each in node if each.quota)])


def _threads(node: Sequence[Facts]) -> int:
    """The smallest number of threads of torch in a rank of the node; 1 if there are fewer cores than threads of all ranks."""
    cores = _usable(node, node[0].cpus.bit_count() // node[0].cores)
    threads = [each.threads or max(1, cores // len(node)) for each in node]
    return min(threads) if sum(threads) <= cores else 1


def _share(own: Facts, node: Iterable[Facts]) -> int:
    """This rank's part of its cores, of which other ranks of the node may use some, too."""
    sharing = sum(bool(own.cpus & other.cpus) for other in node)
    return max(1, min(own.cores, own.quota or own.cores) // sharing)


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


def report(runtime: Runtime, topology: Topology, devices: str) -> None:
    """Logs one line (INFO) about a new world: where it runs. ``devices`` says how device memory travels."""
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
