"""Which algorithm carries an operation out. Decided only from values that are equal on every rank of the group.

    native         one MPI call                                             what is small, and what nothing below can do
    window         the node's shared memory                                 all ranks on one node
    hierarchical   window within nodes, MPI between them                    several nodes, some with several ranks

The sizes from which one takes over from the other are a table, measured (``python -m mpicoll.bench tune`` writes one for the
machine at hand); rank 0's is everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mpicoll import config

LARGEST_DISPLACEMENT = 2**31 - 1  # MPI's displacements are C ints
NEVER = 1 << 62  # bytes

# Bytes from which the window is faster than MPI's own, by the number of ranks on the node (the next lower one counts). From
# `bench tune` on 2 cores with Open MPI 5.0.11 and MPICH 5.0.2; the larger of the two.
WINDOW_FROM: dict[str, dict[int, int]] = {
    "all_reduce": {2: 32 << 10},
    "reduce": {2: 128 << 10},
    "reduce_scatter": {2: 64 << 10},
    "all_gather": {2: 64 << 10},
    "broadcast": {2: 128 << 10},
}


@dataclass(frozen=True)
class Choices:
    """What all ranks have agreed upon.

    window_bytes: the most memory that one group's window takes on a node; 0: no windows. chunk_bytes: the most that a rank
    lays down at a time. window_from: as WINDOW_FROM. node_size: ranks of a pretended node, 0: nodes as they are.
    """

    window_bytes: int = 64 << 20
    chunk_bytes: int = 1 << 20
    node_size: int = 0
    window_from: Mapping[str, Mapping[int, int]] = field(default_factory=lambda: WINDOW_FROM)

    def least(self, operation: str, ranks: int, crowded: bool) -> int:
        """Bytes from which ``operation`` goes through the window of so many ranks; NEVER: not at all."""
        if ranks < 2 or self.window_bytes <= 0:
            return NEVER
        if crowded:
            return 1  # MPI's own spin, and hold up the rank that they wait for
        known = self.window_from[operation]
        return known[max((n for n in known if n <= ranks), default=min(known))]


def choices() -> Choices:
    """This rank's: the table of MPICOLL_TUNING, or the one above, and the variables that override it.

    Raises: ValueError: a variable, or the file, holds what is not allowed.
    """
    table = WINDOW_FROM
    if path := config.get("MPICOLL_TUNING"):
        table = {**WINDOW_FROM, **load(Path(path))}
    if (everywhere := config.get("MPICOLL_WINDOW_FROM")) is not None:
        table = {operation: {2: everywhere} for operation in WINDOW_FROM}
    return Choices(window_bytes=config.get("MPICOLL_WINDOW_BYTES"), node_size=config.get("MPICOLL_NODE_SIZE"), window_from=table)


def load(path: Path) -> dict[str, dict[int, int]]:
    """A table that ``bench tune`` has written.

    Raises: ValueError: there is no such file, or it is none.
    """
    try:
        table = json.loads(path.read_text())["window_from"]
        return {operation: {int(n): int(size) for n, size in table[operation].items()} for operation in table if table[operation]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"MPICOLL_TUNING={path}: not a table of `python -m mpicoll.bench tune`: {type(error).__name__}: {error}"
        ) from error


def all_gather(nbytes: Sequence[int]) -> Literal["even", "uneven", "pairs"]:
    """``nbytes``: the size of every rank's block, which every rank knows from its list of outputs."""
    if min(nbytes) == max(nbytes):
        return "even"
    return "uneven" if sum(nbytes) <= LARGEST_DISPLACEMENT else "pairs"
