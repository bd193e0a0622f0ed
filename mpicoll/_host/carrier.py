"""Carries plain memory by the algorithm that `choose` names.

Each method is called by all ranks of the group, in the same order, inside an operation: a window is made on first use, by
all of them. False: nothing was done, and MPI's own is the way.

# Note [Communicators are made with the group]
# First uses come on lanes, and so at the same time and in different orders on different ranks. Of two communicators that
# Open MPI (5.0.11) makes at the same time, every few hundredth hangs in its first collectives; mpi4py alone shows it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpicoll._algorithms import direct, hierarchical, shared_memory
from mpicoll._algorithms.blocks import Block, block
from mpicoll._algorithms.hierarchical import Nodes
from mpicoll._algorithms.window import LINE, Window, parts
from mpicoll._host import thresholds, two_level
from mpicoll._host.thresholds import NEVER, Choices
from mpicoll._log import Algorithms
from mpicoll._mpi import runtime, shared_segment
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.channel import ANY_SOURCE, Channel
from mpicoll._mpi.datatypes import fromaddress
from mpicoll._mpi.topology import Topology
from mpicoll._progress.progress import Lane
from mpicoll._tensors.combine import Kernel

# The algorithms' names in the log
WINDOW = "shared memory"
NODES = "shared memory in each node, MPI between nodes"
MOVED = "messages, reduced by torch"

PAGE = 4096  # bytes
FLAT_BYTES = 64 << 10  # that a rank reads of others; up to here one hand-over is dearer than the work that slices save
SPINS = 1000  # looks, 50 us; handing over between two ranks that both run takes less
BESIDE_YIELD_S = 500e-6  # seconds; as Backoff's
ALIVE_S = 0.05  # seconds between two questions whether the others are alive, of a rank that waits for them


class Carrier:
    """One per group.

    Args:   topology: of the group's ranks. lane: the group's; its thread sleeps where another one may spin. algorithms: logs
            which one is taken.
    """

    def __init__(self, channel: Channel, topology: Topology, choices: Choices, lane: Lane, algorithms: Algorithms) -> None:
        self.channel = channel
        self.took = algorithms.took
        self.rank: int = channel.comm.Get_rank()
        self.size: int = channel.comm.Get_size()
        self._choices = choices
        self._lane = lane
        self._topology = topology
        self._window: Window | None = None
        self._nodes: Nodes | None = None
        self._rail: Any = None
        #: bytes from which an operation goes through the node's window, or the nodes' ones; changed in place
        self.least = dict.fromkeys(thresholds.WINDOW_FROM, NEVER)
        self._possible = self.size > 1 and choices.window_bytes > 0 and not channel.serialized
        if not self._possible:
            return
        sizes = list(Counter(topology.nodes).values())
        # Over nodes, these two need a piece for every rank of the group in a slot.
        roomless = thresholds.EVEN if self._chunk(max(sizes)) < LINE * max(sizes) * len(sizes) else frozenset[str]()
        for operation in self.least:
            if topology.single:
                self.least[operation] = choices.least(operation, self.size)
            elif operation not in roomless:
                self.least[operation] = choices.least_between(operation, sizes)

    def connect(self) -> None:
        """Makes what leads from node to node (collective); Note [Communicators are made with the group]."""
        if not self._topology.single and min(self.least.values()) < NEVER:
            here, place = self._place()
            with self.channel.lock:
                # Not by Split_type: nodes may be pretended, and the topology's are what all ranks count with.
                self._rail = self.channel.comm.Split(place, here)

    def all_reduce(self, memory: Tensor, kernel: Kernel) -> bool:
        """In place on every rank."""
        nbytes = memory.nbytes
        if nbytes >= self.least["halves" if kernel.widened else "all_reduce"]:
            flat = plain(memory, kernel.dtype)
            if (window := self.window()) is not None:
                self.took("all_reduce", WINDOW, nbytes)
                if nbytes * (self.size - 1) <= FLAT_BYTES and nbytes <= window.chunk:
                    shared_memory.all_reduce_flat(window, flat, kernel.combine)
                else:
                    shared_memory.all_reduce(window, flat, kernel.combine)
                return True
            if (nodes := self.nodes()) is not None:
                self.took("all_reduce", NODES, nbytes)
                hierarchical.all_reduce(nodes, flat, two_level.of(kernel, self.size))
                return True
        if not self._moves(kernel, nbytes):
            return False
        self.took("all_reduce", MOVED, nbytes)
        direct.all_reduce(self.channel, plain(memory, kernel.dtype), kernel.combine)
        return True

    def reduce(self, memory: Tensor, kernel: Kernel, root: int) -> bool:
        """In place on the root."""
        if memory.nbytes < self.least["reduce"]:
            return False
        flat = plain(memory, kernel.dtype)
        if (window := self.window()) is not None:
            self.took("reduce", WINDOW, memory.nbytes)
            shared_memory.all_reduce(window, flat, kernel.combine, root)
        elif (nodes := self.nodes()) is not None:
            self.took("reduce", NODES, memory.nbytes)
            hierarchical.all_reduce(nodes, flat, two_level.of(kernel, self.size), root)
        else:
            return False
        return True

    def reduce_scatter(self, output: Tensor, memory: Tensor, kernel: Kernel) -> bool:
        """Equal blocks; no memory in common."""
        nbytes = memory.nbytes
        if nbytes >= self.least["reduce_scatter"]:
            target, source = plain(output, kernel.dtype), plain(memory, kernel.dtype)
            if (window := self.window()) is not None:
                self.took("reduce_scatter", WINDOW, nbytes)
                shared_memory.reduce_scatter(window, target, source, kernel.combine)
                return True
            if (nodes := self.nodes()) is not None:
                self.took("reduce_scatter", NODES, nbytes)
                hierarchical.reduce_scatter(nodes, target, source, two_level.of(kernel, self.size))
                return True
        if not self._moves(kernel, nbytes):
            return False
        self.took("reduce_scatter", MOVED, nbytes)
        direct.reduce_scatter(self.channel, plain(output, kernel.dtype), plain(memory, kernel.dtype), kernel.combine)
        return True

    def broadcast(self, memory: Tensor, root: int) -> bool:
        if memory.nbytes < self.least["broadcast"]:
            return False
        if (window := self.window()) is not None:
            self.took("broadcast", WINDOW, memory.nbytes)
            shared_memory.broadcast(window, block(memory), root)
        elif (nodes := self.nodes()) is not None:
            self.took("broadcast", NODES, memory.nbytes)
            hierarchical.broadcast(nodes, block(memory), root)
        else:
            return False
        return True

    def all_gather(self, targets: Sequence[Block], source: Block) -> bool:
        """Blocks of any sizes, which all ranks know; a rank's own target may be its source."""
        total = sum(nbytes for _, nbytes in targets)
        if total < self.least["all_gather"]:
            return False
        if (window := self.window()) is not None:
            self.took("all_gather", WINDOW, total)
            shared_memory.all_gather(window, targets, source)
        elif all(nbytes == source[1] for _, nbytes in targets) and (nodes := self.nodes()) is not None:
            self.took("all_gather", NODES, total)
            hierarchical.all_gather(nodes, targets, source)
        else:
            return False
        return True

    def all_to_all(self, targets: Sequence[Block], sources: Sequence[Block]) -> list[tuple[int, int]] | None:
        """Blocks of any sizes, be they known to this rank alone.

        Returns: the pairs of ranks that expect different sizes of each other; nothing was done then. None: not done here.
        """
        window = self.window()
        if window is None:
            return None
        self.took("all_to_all", WINDOW, sum(nbytes for _, nbytes in targets))
        return shared_memory.all_to_all(window, targets, sources)

    def barrier(self, timeout_s: float) -> bool | None:
        """True when every rank has come, False if they have not in time; None: not done here.

        Makes no window: who waits for a rank to make one with waits without end.
        """
        if self._window is None:
            return None
        return shared_memory.barrier(self._window, self.pause(), timeout_s)

    def _moves(self, kernel: Kernel, nbytes: int) -> bool:
        """Whether a reduction that goes no other way is made of moved bytes."""
        return kernel.widened and nbytes >= self._choices.least_moved(self.size)

    # -- windows, made on first use (collective then); None, for ever, if a rank could not have its own ----------------

    def window(self) -> Window | None:
        """The one window of a group on one node."""
        if self._window is None and self._topology.single and self._possible:
            self._window = self._window_of(range(self.size), self.size)
            if self._window is None:
                self._give_up()
        return self._window

    def nodes(self) -> Nodes | None:
        """The windows of a group on several nodes, and what leads from one to another."""
        if self._nodes is None and self._rail is not None and self._possible:
            self._nodes = self._between_nodes()
            if self._nodes is None:
                self._give_up()
        return self._nodes

    def _between_nodes(self) -> Nodes | None:
        members, (here, _) = self._members(), self._place()
        window = self._window_of(members[here], max(len(ranks) for ranks in members))
        return None if window is None else Nodes(window, self._rail, members, here)

    def _place(self) -> tuple[int, int]:
        """This rank's node, and its number there."""
        return next((node, ranks.index(self.rank)) for node, ranks in enumerate(self._members()) if self.rank in ranks)

    def _members(self) -> list[list[int]]:
        """Each node's ranks, from the node of the first rank on."""
        members: dict[int, list[int]] = {}
        for rank, node in enumerate(self._topology.nodes):
            members.setdefault(node, []).append(rank)
        return list(members.values())

    def _chunk(self, ranks: int) -> int:
        """Bytes of a slot in a window of so many ranks."""
        return min(self._choices.chunk_bytes, self._choices.window_bytes // parts(ranks)) // PAGE * PAGE

    def _window_of(self, ranks: Sequence[int], most: int) -> Window | None:
        """This rank's, which is one of ``ranks`` (collective over the group); None on all if one cannot have its own.

        Args:   most: ranks of the largest of such windows, so that the chunks are alike.
        """
        chunk = self._chunk(most)
        if chunk < LINE * most:  # a piece for every rank of the node
            return None
        made = shared_segment.create(self.channel.comm, Window.nbytes(len(ranks), chunk), maker=ranks[0])
        if made is None:
            return None
        return Window(made, ranks.index(self.rank), len(ranks), chunk, self.pause, self.spins)

    def _give_up(self) -> None:
        self._possible = False
        self.least.update(dict.fromkeys(self.least, NEVER))

    def close(self) -> None:
        """Frees what was made; called on an explicit destroy only, never from garbage collection."""
        if self._rail is not None and not runtime.finalized():
            with self.channel.lock:
                self._rail.Free()
        self._window = self._nodes = self._rail = None
        self._give_up()

    @property
    def shares_memory(self) -> bool:
        """Whether the group is on one node, and may use its memory."""
        return self._possible and self._topology.single

    def beside(self, rank: int) -> bool:
        """Whether a rank is another one on this rank's node."""
        nodes = self._topology.nodes
        return rank != self.rank and nodes[rank] == nodes[self.rank]

    @property
    def spins(self) -> int:
        """How often to look before `pause` is asked for."""
        return 0 if self._topology.crowded else SPINS

    def pause(self) -> Callable[[], None]:
        return Waiting(self.channel, threading.get_ident() == self._lane.thread_id, self._topology.crowded)


class Waiting:
    """What to do between two looks at what another rank has not written yet.

    A lane's thread runs beside the program, which needs the core, and the interpreter, that it would spin on: it sleeps.
    """

    def __init__(self, channel: Channel, beside: bool, crowded: bool) -> None:
        self._channel = channel
        self._backoff = Backoff(0.0 if beside or crowded else Backoff.SPIN_S, BESIDE_YIELD_S if beside else Backoff.YIELD_S)
        self._ask_at = time.monotonic() + ALIVE_S

    def __call__(self) -> None:
        self._backoff.pause()
        if time.monotonic() > self._ask_at:
            # Nobody is in MPI here, so MPI's word that a rank has died (ULFM) must be asked for.
            self._channel.comm.Iprobe(ANY_SOURCE)
            self._ask_at = time.monotonic() + ALIVE_S


def plain(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory as a tensor of one dimension that torch's kernels may write, whatever autograd thinks of it."""
    return torch.frombuffer(fromaddress(memory.data_ptr(), memory.nbytes), dtype=dtype)
