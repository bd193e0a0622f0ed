"""Operations over several nodes: through the window within each, by MPI between them. Chunk after chunk of the window.

              node 0            node 1                    place   a rank's number on its node
    place 0   rank 0  --rail--  rank 3                    rail    a communicator of the ranks of one place, in the order of
    place 1   rank 1  --rail--  rank 4                            the nodes
    place 2   rank 2                                      rank 2 is of a place that not every node has

Every place that all nodes have drives the network with its slice of a chunk, so that all ranks of a node do; where a node
has one rank only, one of every node does. An element is reduced on one rail, and the same bits come to all nodes.

Called by all ranks of the group, in the same order, with the same sizes. Steps [1]..[3] are window.py's.

# Note [Why nobody waits in a circle]
# A rank enters MPI for turn t in [2], after it has laid turn t down and everybody on its node has. To lay it down it waited
# for others to take turn t - 2, and for nothing on other nodes. So, by induction over turns, everybody comes to MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpicoll._algorithms import shared_memory
from mpicoll._algorithms.blocks import Block
from mpicoll._algorithms.shared_memory import Combine
from mpicoll._algorithms.window import LINE, Window, memmove
from mpicoll._mpi.channel import IN_PLACE
from mpicoll._mpi.datatypes import BYTE, fromaddress

NOBODY = -1  # of a node, when a result is for a rank of another


@dataclass(frozen=True)
class Nodes:
    """What one rank sees of them.

    window: of its node; its rank there is its place. rail: its communicator. members: members[i][j] is the rank of place j
    on node i. node: this rank's.
    """

    window: Window
    rail: Any
    members: Sequence[Sequence[int]]
    node: int

    @cached_property
    def places(self) -> int:
        """That every node has."""
        return min(len(ranks) for ranks in self.members)

    @cached_property
    def at(self) -> dict[int, tuple[int, int]]:
        """Each rank's node and place."""
        return {rank: (node, place) for node, ranks in enumerate(self.members) for place, rank in enumerate(ranks)}


@dataclass(frozen=True)
class Stages:
    """A reduction that one stage begins and another goes on with.

    partial: (a node's parts in the order of places, code) -> None. code: its dtype, an element for each of the parts'.
    datatype, op: MPI's, for code. finish: (code, out) -> None, once per element; None: the code is the result.
    """

    partial: Combine
    code: torch.dtype
    datatype: Any
    op: Any
    finish: Callable[[Tensor, Tensor], None] | None

    def spec(self, code: Tensor) -> list[object]:
        return [fromaddress(code.data_ptr(), code.nbytes), code.numel(), self.datatype]


def all_reduce(nodes: Nodes, memory: Tensor, stages: Stages, root: int | None = None) -> None:
    """As within a node, but a slice goes over its rail before it becomes the result. ``memory`` is one-dimensional."""
    window, rail, finish = nodes.window, nodes.rail, stages.finish
    slice_ = min(memory.nbytes, window.chunk // 2) // nodes.places + LINE
    scratch = torch.empty(0 if finish is None else slice_ // memory.element_size(), dtype=stages.code, device="cpu")
    root_node, receiver = (None, None) if root is None else nodes.at[root]

    def combine(parts: Sequence[Tensor], out: Tensor) -> None:
        code = out if finish is None else scratch.narrow(0, 0, out.numel())
        stages.partial(parts, code)
        if root_node is None:
            rail.Allreduce(IN_PLACE, stages.spec(code), stages.op)
        elif root_node == nodes.node:
            rail.Reduce(IN_PLACE, stages.spec(code), stages.op, root_node)
        else:
            rail.Reduce(stages.spec(code), None, stages.op, root_node)
            return
        if finish is not None:
            finish(code, out)

    if root_node not in (None, nodes.node):
        receiver = NOBODY
    shared_memory.all_reduce(window, memory, combine, receiver, nodes.places)


def reduce_scatter(nodes: Nodes, output: Tensor, memory: Tensor, stages: Stages) -> None:
    """Rank i gets the reduction of everybody's i-th block of ``memory``; both one-dimensional, no memory in common.

    Nodes must have equally many ranks, and a slot LINE bytes for every rank of the group.
    """
    window, place, finish = nodes.window, nodes.window.rank, stages.finish
    block, address, itemsize = output.nbytes, memory.data_ptr(), memory.element_size()
    # What goes over one rail lies side by side, in the order of its ranks.
    order = [ranks[j] for j in range(window.size) for ranks in nodes.members]
    rail_size = len(nodes.members)
    piece = window.chunk // len(order) // LINE * LINE  # of a block, in a slot
    code = torch.empty(rail_size * min(piece, block) // itemsize, dtype=stages.code, device="cpu")
    scratch = torch.empty(0 if finish is None else min(piece, block) // itemsize, dtype=stages.code, device="cpu")

    def fill(turn: int, begin: int, nbytes: int) -> None:
        slot = window.slot(turn, place)
        for number, rank in enumerate(order):
            memmove(slot + number * nbytes, address + rank * block + begin, nbytes)

    for turn, begin, nbytes in window.turns(block, piece, fill):
        n = nbytes // itemsize
        mine = rail_size * nbytes  # bytes of this rank's rail
        parts = [window.view(memory.dtype, turn, j, place * mine, mine) for j in range(window.size)]
        of_node = code.narrow(0, 0, rail_size * n)
        stages.partial(parts, of_node)  # [2]
        window.take(turn)
        out = output.narrow(0, begin // itemsize, n)
        result = out if finish is None else scratch.narrow(0, 0, n)
        # Not Reduce_scatter_block: Open MPI 5.0's takes five times as long over 512 KiB (two ranks of one host).
        nodes.rail.Reduce_scatter(stages.spec(of_node), stages.spec(result), [n] * rail_size, stages.op)
        if finish is not None:
            finish(result, out)


def all_gather(nodes: Nodes, targets: Sequence[Block], source: Block) -> None:
    """Rank i's source arrives in everybody's targets[i]; equal sizes, a target may be its rank's source.

    Each rail gathers into slots, whence everybody takes. Nodes must have equally many ranks, and a slot LINE bytes for each
    node.
    """
    window, place, (address, total) = nodes.window, nodes.window.rank, source
    rank = nodes.members[nodes.node][place]
    piece = window.chunk // len(nodes.members) // LINE * LINE

    def fill(turn: int, begin: int, nbytes: int) -> None:
        slot = fromaddress(window.slot(turn, place), len(nodes.members) * nbytes)
        nodes.rail.Allgather([fromaddress(address + begin, nbytes), nbytes, BYTE], [slot, nbytes, BYTE])

    for turn, begin, nbytes in window.turns(total, piece, fill):
        for j in range(window.size):
            slot = window.slot(turn, j)
            for node, ranks in enumerate(nodes.members):
                target = targets[ranks[j]][0]
                if ranks[j] != rank or target != address:
                    memmove(target + begin, slot + node * nbytes, nbytes)
        window.take(turn)


def broadcast(nodes: Nodes, memory: Block, root: int) -> None:
    """The root's bytes arrive in everybody's memory.

    The root's slot is what its node reads and the rails send from; on other nodes they send into the result.
    """
    window, place, places, (address, total) = nodes.window, nodes.window.rank, nodes.places, memory
    root_node, root_place = nodes.at[root]
    here = root_node == nodes.node
    piece = window.chunk // 2  # as shared_memory.broadcast
    first = window.turn
    window.turn = first + -(-total // piece)
    for turn in range(first, window.turn):
        begin = (turn - first) * piece
        nbytes = min(piece, total - begin)
        slice_ = shared_memory.round_up(-(-nbytes // places), LINE)
        low, high = min(nbytes, place * slice_), min(nbytes, (place + 1) * slice_)
        drives = place < places and high > low
        if here and place == root_place:
            window.free(turn)
            memmove(window.slot(turn, place), address + begin, nbytes)  # [1]
            window.lay(turn)
        elif here:
            window.await_laid_by(root_place, turn)
        else:
            window.lay(turn)  # nothing, but that the result of turn - 2 has been read
            if drives:
                window.await_laid(turn)
        chunk = window.slot(turn, root_place) if here else window.result(turn)
        if drives:
            nodes.rail.Bcast([fromaddress(chunk + low, high - low), high - low, BYTE], root_node)  # [2]
        if here:
            if place != root_place:
                memmove(address + begin, chunk, nbytes)
            window.take(turn)
        else:
            window.take(turn)
            window.await_taken(turn)
            memmove(address + begin, chunk, nbytes)  # [3]
