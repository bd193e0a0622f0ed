"""Operations over several nodes: through the window within each node, by MPI between nodes. One chunk of the window at a time.

              node 0            node 1                    place   a rank's number on its node
    place 0   rank 0  --rail--  rank 3                    rail    a communicator of the ranks of one place, in the order of
    place 1   rank 1  --rail--  rank 4                            the nodes
    place 2   rank 2                                      rank 2 has a place that not every node has

Each place that exists on every node sends its own slice of a chunk over the network, so all ranks of a node share the work. If
some node has a single rank, only place 0 of each node sends. An element is reduced on one rail, so all nodes get the same bits.

All ranks of the group call an operation in the same order, with the same sizes. Steps [1]..[3] are those of window.py.

# Note [Why nobody waits in a circle]
# A rank enters MPI for turn t in [2], after all ranks of its node have laid turn t down. To lay it down, a rank waits only for
# others of its node to take turn t - 2, and for nothing on other nodes. So, by induction over turns, every rank reaches MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpicoll._algorithms import shared_memory
from mpicoll._algorithms.blocks import Block
from mpicoll._algorithms.rail import Finish, Rail
from mpicoll._algorithms.window import LINE, Window
from mpicoll._tensors.combine import Combine

NOBODY = -1  # the receiver on a node, if the result is for a rank of another node


@dataclass(eq=False, repr=False)
class Nodes:
    """The nodes of a group, as one rank sees them."""

    window: Window  # of this rank's node; the rank's number in it is its place
    rail: Rail  # of this rank
    members: Sequence[Sequence[int]]  # members[i][j] is the rank of place j on node i
    node: int  # this rank's

    @cached_property
    def places(self) -> int:
        """Number of places that every node has."""
        return min(len(ranks) for ranks in self.members)

    @cached_property
    def at(self) -> dict[int, tuple[int, int]]:
        """Node and place of each rank."""
        return {rank: (node, place) for node, ranks in enumerate(self.members) for place, rank in enumerate(ranks)}


class Stages(NamedTuple):
    """A reduction in stages: the first works within a node, the second goes on between nodes."""

    partial: Combine  # reduces the parts of a node, in the order of places, into a code with an element for each of theirs
    code: torch.dtype
    datatype: Any  # MPI's, of the code
    op: Any  # MPI's, which reduces the code
    finish: Finish | None  # (code, out), once per element; None: the code is the result


def all_reduce(nodes: Nodes, memory: Tensor, stages: Stages, root: int | None = None) -> None:
    """Reduces one-dimensional memory as within a node, but a slice goes over its rail before it becomes the result."""
    window, rail, finish = nodes.window, nodes.rail, stages.finish
    slice_ = min(memory.nbytes, window.piece) // nodes.places + LINE
    scratch = torch.empty(0 if finish is None else slice_ // memory.element_size(), dtype=stages.code, device="cpu")
    root_node, receiver = (None, None) if root is None else nodes.at[root]

    def combine(parts: Sequence[Tensor], out: Tensor) -> None:
        code = out if finish is None else scratch.narrow(0, 0, out.numel())
        stages.partial(parts, code)
        if root_node is None:
            rail.all_reduce(code, stages.datatype, stages.op, out, finish)
            return
        rail.reduce(code, stages.datatype, stages.op, root_node)
        if finish is not None and root_node == nodes.node:
            finish(code, out)

    if root_node not in (None, nodes.node):
        receiver = NOBODY
    shared_memory.all_reduce(window, memory, combine, receiver, nodes.places)


def reduce_scatter(nodes: Nodes, output: Tensor, memory: Tensor, stages: Stages) -> None:
    """Rank i gets the reduction of the i-th block of every rank's ``memory``. Both are one-dimensional and do not overlap.

    All nodes must have the same number of ranks, and a slot must have LINE bytes for every rank of the group.
    """
    window, place, finish = nodes.window, nodes.window.rank, stages.finish
    block, address, itemsize = output.nbytes, memory.data_ptr(), memory.element_size()
    # Blocks that go over one rail are side by side, in the order of the rail's ranks.
    order = [ranks[j] for j in range(window.size) for ranks in nodes.members]
    rail_size = len(nodes.members)
    piece = window.chunk // len(order) // LINE * LINE  # bytes of a block in a slot
    # The rail moves one piece while the next one is reduced on the node.
    code = torch.empty(2, rail_size * min(piece, block) // itemsize, dtype=stages.code, device="cpu")
    scratch = torch.empty(2, 0 if finish is None else min(piece, block) // itemsize, dtype=stages.code, device="cpu")
    moving: Callable[[], None] | None = None

    def fill(turn: int, begin: int, nbytes: int) -> None:
        slot = window.slot(turn, place)
        for number, rank in enumerate(order):
            window.copy(slot + number * nbytes, address + rank * block + begin, nbytes)

    for turn, begin, nbytes in window.turns(block, piece, fill):
        n = nbytes // itemsize
        rail_nbytes = rail_size * nbytes  # bytes that go over this rank's rail
        parts = [window.view(memory.dtype, turn, j, place * rail_nbytes, rail_nbytes) for j in range(window.size)]
        partial = code[turn & 1].narrow(0, 0, rail_size * n)
        stages.partial(parts, partial)  # [2]
        window.take(turn)
        started = _scattered(nodes.rail, stages, partial, scratch[turn & 1], output.narrow(0, begin // itemsize, n))
        if moving is not None:
            moving()
        moving = started
    if moving is not None:
        moving()


def _scattered(rail: Rail, stages: Stages, partial: Tensor, scratch: Tensor, out: Tensor) -> Callable[[], None]:
    """Starts the way of a piece over the rail. Returns a function that ends it."""
    finish = stages.finish
    result = out if finish is None else scratch.narrow(0, 0, out.numel())
    end = rail.reduce_scatter(partial, result, stages.datatype, stages.op)
    if finish is None:
        return end

    def ended() -> None:
        end()
        finish(result, out)

    return ended


def all_gather(nodes: Nodes, targets: Sequence[Block], source: Block) -> None:
    """The source of rank i arrives in ``targets[i]`` of every rank. Sizes are equal; a target may be its rank's source.

    Each rail gathers into slots, and every rank copies from the slots. All nodes must have the same number of ranks, and a slot
    must have LINE bytes for each node.
    """
    window, place, (address, total) = nodes.window, nodes.window.rank, source
    rank = nodes.members[nodes.node][place]
    piece = window.chunk // len(nodes.members) // LINE * LINE

    def fill(turn: int, begin: int, nbytes: int) -> Callable[[], None]:
        return nodes.rail.all_gather((address + begin, nbytes), window.slot(turn, place))

    for turn, begin, nbytes in window.turns(total, piece, fill):
        for j in range(window.size):
            slot = window.slot(turn, j)
            for node, ranks in enumerate(nodes.members):
                target = targets[ranks[j]][0]
                if ranks[j] != rank or target != address:
                    window.copy(target + begin, slot + node * nbytes, nbytes)
        window.take(turn)


def broadcast(nodes: Nodes, memory: Block, root: int) -> None:
    """The bytes of the root arrive in the memory of every rank.

    The root writes its slot. Its node reads this slot, and the rails send from it; on other nodes they write into the result.
    """
    window, place, places, (address, total) = nodes.window, nodes.window.rank, nodes.places, memory
    root_node, root_place = nodes.at[root]
    on_root_node = root_node == nodes.node
    for turn, begin, nbytes in window.extents(total, window.piece):
        slice_ = shared_memory.round_up(-(-nbytes // places), LINE)
        low, high = min(nbytes, place * slice_), min(nbytes, (place + 1) * slice_)
        has_slice = place < places and high > low
        if on_root_node and place == root_place:
            window.free(turn)
            window.copy(window.slot(turn, place), address + begin, nbytes)  # [1]
            window.lay(turn)
        elif on_root_node:
            window.await_laid_by(root_place, turn)
        else:
            window.free(turn)
            window.lay(turn)  # says only that this rank has read the result of turn - 2
            if has_slice:
                window.await_laid(turn)
        chunk = window.slot(turn, root_place) if on_root_node else window.result(turn)
        if has_slice:
            nodes.rail.broadcast((chunk + low, high - low), root_node)  # [2]
        if on_root_node:
            if place != root_place:
                window.copy(address + begin, chunk, nbytes)
            window.take(turn)
        else:
            window.take(turn)
            window.await_taken(turn)
            window.copy(address + begin, chunk, nbytes)  # [3]
