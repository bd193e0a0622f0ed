"""Makes the shared windows of a group, and the communicators between its nodes.

# Note [Communicators are made with the group]
# First uses happen in the threads of several groups' queues, and so at the same time and in different orders on different
# ranks. If Open MPI (5.0.11) makes two communicators at the same time, every few hundredth of them hangs in its first
# collectives; mpi4py alone shows it. So `connect` makes the communicators with the group. Windows need no communicator, and are
# made on first use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from mpicoll._algorithms.blocks import copy
from mpicoll._algorithms.hierarchical import Nodes
from mpicoll._algorithms.rail import Rail
from mpicoll._algorithms.window import LINE, Window, memmove
from mpicoll._base.waits import ALIVE_S
from mpicoll._mpi import runtime, shared_segment
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.topology import Topology

SPINS = 1000  # checks, 50 us; a hand-over between two running ranks takes less
BESIDE_YIELD_S = 500e-6  # ``yield_s`` of `Backoff` for a thread in the background


class Windows:
    """The windows of one group.

    Args:
        chunk: Returns the bytes of a slot, for so many ranks in a window, nodes of the group, and threads of each rank.
        in_background: True if the calling thread runs beside the program's thread, which needs the core and the interpreter.
        call: Returns a number of the collective under way, equal on all ranks if their calls are equal.
    """

    def __init__(
        self,
        channel: Channel,
        topology: Topology,
        chunk: Callable[[int, int, int], int],
        in_background: Callable[[], bool],
        call: Callable[[], int] = lambda: 0,
    ) -> None:
        self._channel = channel
        self._topology = topology
        self._chunk = chunk
        self._in_background = in_background
        self._call = call
        self._rank: int = channel.comm.Get_rank()
        self._rail: Rail | None = None
        self._possible = True
        self.apart = not topology.single  # the group has ranks on several nodes
        self.window: Window | None = None  # of a group on one node
        self.nodes: Nodes | None = None  # of a group on several nodes

    def connect(self) -> None:
        """Makes the communicators between nodes (collective). See Note [Communicators are made with the group]."""
        node = self._node()
        place = self._members[node].index(self._rank)
        with self._channel.lock:
            # Not Split_type: the topology may pretend more nodes than there are, and all ranks use the nodes of the topology.
            self._rail = Rail(self._channel, self._channel.comm.Split(place, node))

    def make(self) -> bool:
        """Gets the windows ready for the collective under way; makes them on first use (collective then).

        If a rank could not make its window, returns False for ever.
        """
        if self.window is None and self.nodes is None and self._possible:
            if self._topology.single:
                size = len(self._topology.nodes)
                self.window = self._window_of(range(size), size)
            elif self._rail is not None:
                self.nodes = self._between_nodes(self._rail)
            self._possible = self.window is not None or self.nodes is not None
        if self._possible:
            window = self.window if self.nodes is None else self.nodes.window
            assert window is not None
            window.call = self._call()
            if self._topology.threads > 1:
                window.copy = copy if 1 < torch.get_num_threads() <= self._topology.share else memmove
        return self._possible

    def _between_nodes(self, rail: Rail) -> Nodes | None:
        members, node = self._members, self._node()
        window = self._window_of(members[node], max(len(ranks) for ranks in members))
        return None if window is None else Nodes(window, rail, members, node)

    @property
    def node_members(self) -> Sequence[Sequence[int]]:
        """The ranks of each node."""
        return self._members

    @property
    def node(self) -> Sequence[int]:
        """The ranks of this rank's node."""
        return self._members[self._node()]

    def _node(self) -> int:
        """Number of this rank's node."""
        return next(node for node, ranks in enumerate(self._members) if self._rank in ranks)

    @cached_property
    def _members(self) -> list[list[int]]:
        """The ranks of each node, beginning with the node of the first rank."""
        members: dict[int, list[int]] = {}
        for rank, node in enumerate(self._topology.nodes):
            members.setdefault(node, []).append(rank)
        return list(members.values())

    def _window_of(self, ranks: Sequence[int], most: int) -> Window | None:
        """Makes the window of this rank's node (collective over the group). None on all ranks if one of them cannot.

        ``most`` is the number of ranks of the largest such window, so that all windows have equal chunks.
        """
        threads = self._topology.threads
        chunk = self._chunk(most, len(self._members), threads)
        if chunk < LINE * most:  # no room for a piece for every rank of the node
            return None
        segment = shared_segment.create(self._channel.comm, Window.nbytes(len(ranks), chunk), maker=ranks[0])
        if segment is None:
            return None
        return Window(segment, ranks.index(self._rank), len(ranks), chunk, self.pause, self.spins, threads)

    def close(self) -> None:
        """Frees the windows and the communicator. Called on an explicit destroy only, never from garbage collection."""
        if self._rail is not None and not runtime.finalized():
            with self._channel.lock:
                self._rail.free()
        self._rail = self.window = self.nodes = None
        self._possible = False

    @property
    def spins(self) -> int:
        """Number of checks before `pause` is called."""
        return 0 if self._topology.crowded else SPINS

    def pause(self, place: int) -> Callable[[], None]:
        """Makes the function that is called between two checks of a word that the rank of a place has not written yet.

        A thread in the background sleeps where another thread may spin.
        """
        in_background = self._in_background()
        spin_s = 0.0 if in_background or self._topology.crowded else Backoff.SPIN_S
        backoff = Backoff(self._channel.ranks[self.node[place]], spin_s, BESIDE_YIELD_S if in_background else Backoff.YIELD_S)
        ask_at = time.monotonic() + ALIVE_S

        def wait() -> None:
            nonlocal ask_at
            backoff.pause()
            if time.monotonic() > ask_at:
                # No thread is inside MPI while this one waits, so ask it: ULFM reports a dead rank only from an MPI call.
                self._channel.progress()
                ask_at = time.monotonic() + ALIVE_S

        return wait
