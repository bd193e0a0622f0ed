"""Which algorithm carries an operation out. Decided only from values that are equal on every rank of the group.

    native         one MPI call                                             what is small, and what nothing below can do
    window         the node's shared memory                                 all ranks on one node
    hierarchical   window within nodes, MPI between them                    several nodes, some with several ranks
    moved          messages and torch's kernels                             halves, where neither of these can be had

The sizes from which one takes over from the other are a table, measured (``python -m mpicoll.bench tune`` writes one for the
machine at hand); rank 0's is everybody's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mpicoll import _config

LARGEST_DISPLACEMENT = 2**31 - 1  # MPI's displacements are C ints
NEVER = 1 << 62  # bytes

# Bytes from which the window is faster than MPI's own, by the number of ranks on the node (the next lower one counts): what
# `bench tune` found with 2 and with 4 ranks on 2 cores. MPIs differ by factors; one that is not here takes the larger figure.
# "halves": all_reduce of bfloat16 and float16, which MPI reduces as float32.
MEASURED: dict[str, dict[str, dict[int, int]]] = {
    "Open MPI": {  # 5.0.11
        "all_reduce": {2: 8 << 20, 4: 512 << 10},
        "halves": {2: 1, 4: 1},
        "reduce": {2: 8 << 20, 4: 1 << 20},
        "reduce_scatter": {2: 256 << 10, 4: 512 << 10},
        "all_gather": {2: 1 << 20, 4: 1 << 20},
        "broadcast": {2: 512 << 10, 4: 128 << 10},
    },
    "MPICH": {  # 5.0.2
        "all_reduce": {2: 16 << 10, 4: 1 << 10},
        "halves": {2: 1, 4: 1},
        "reduce": {2: 32 << 10, 4: 16 << 10},
        "reduce_scatter": {2: 256 << 10, 4: 256 << 10},
        "all_gather": {2: 256 << 10, 4: 128 << 10},
        "broadcast": {2: 8 << 10, 4: 8 << 10},
    },
}
WINDOW_FROM: dict[str, dict[int, int]] = {
    operation: {n: max(table[operation][n] for table in MEASURED.values()) for n in sizes}
    for operation, sizes in MEASURED["MPICH"].items()
}

# Bytes from which the hierarchical way is, by the same names and by the number of nodes (the next lower one counts).
#
# By the model: among n ranks MPI's own take log2(n) to n - 1 latencies of the network, whoever sits beside whom; these take
# those of the nodes alone, and every byte crosses the network as often as it must, k ranks of a node sending 1/k each. Against
# it stand hand-overs in the window, some 10 us each. Measured with two ranks on each of two hosts (namespaces with TCP between
# them, 2 cores in all, Open MPI 5.0.11): from these sizes on it is ahead, from 4 MiB on 1.6 to 4 times; MPICH 5.0.2 lets ranks
# that share a core wait so long (2 ms) that below 1 MiB nothing can be told apart.
BETWEEN_FROM: dict[str, dict[int, int]] = {
    "all_reduce": {2: 64 << 10},
    "halves": {2: 64 << 10},
    "reduce": {2: 128 << 10},
    "reduce_scatter": {2: 512 << 10},  # the one in which MPI's own moves no byte twice
    "all_gather": {2: 128 << 10},
    "broadcast": {2: 128 << 10},
}
WITHIN, BETWEEN = "window_from", "between_from"  # these tables' names in a file
EVEN = frozenset({"reduce_scatter", "all_gather"})  # which need equally many ranks on each node

# Bytes, of what one rank reduces for all, from which halves are moved rather than reduced by MPI as float32: n - 1 messages, some
# us each, against half of the bytes. From 64 KiB on two ranks it is ahead, from 1 MiB on 1.5 to 8 times (Open MPI and MPICH,
# two hosts and one).
MOVED_FROM = 32 << 10


@dataclass(frozen=True)
class Choices:
    """What all ranks have agreed upon.

    window_bytes: the most memory that one group's window takes on a node; 0: no windows. chunk_bytes: the most that a rank
    lays down at a time. window_from: as WINDOW_FROM, between_from: as BETWEEN_FROM, moved_from: as MOVED_FROM. node_size: ranks
    of a pretended node, 0: nodes as they are. gpus: some rank has a GPU. direct: MPI takes their memory. shares_gpus: every rank
    has one, and may open those of its node.
    """

    window_bytes: int = 64 << 20
    chunk_bytes: int = 1 << 20
    node_size: int = 0
    window_from: Mapping[str, Mapping[int, int]] = field(default_factory=lambda: WINDOW_FROM)
    between_from: Mapping[str, Mapping[int, int]] = field(default_factory=lambda: BETWEEN_FROM)
    moved_from: int = MOVED_FROM
    gpus: bool = False
    direct: bool = False
    shares_gpus: bool = False

    def least(self, operation: str, ranks: int) -> int:
        """Bytes from which ``operation`` goes through the window of so many ranks; NEVER: not at all."""
        if ranks < 2 or self.window_bytes <= 0:
            return NEVER
        return _next_lower(self.window_from[operation], ranks)

    def least_moved(self, ranks: int) -> int:
        """Bytes from which halves that go no other way are reduced by moving them; NEVER: not at all."""
        return self.moved_from * ranks if ranks > 1 else NEVER

    def least_between(self, operation: str, sizes: Sequence[int]) -> int:
        """Bytes from which ``operation`` goes the hierarchical way over nodes of so many ranks; NEVER: not at all."""
        uneven = min(sizes) != max(sizes)
        if max(sizes) < 2 or self.window_bytes <= 0 or (uneven and operation in EVEN):
            return NEVER
        return _next_lower(self.between_from[operation], len(sizes))


def _next_lower(known: Mapping[int, int], number: int) -> int:
    return known[max((n for n in known if n <= number), default=min(known))]


def choices(library: str = "") -> Choices:
    """This rank's: the table of MPICOLL_TUNING, or the one above, and the variables that override it.

    Args:   library: what the MPI says of itself, beginning with its name.
    Raises: ValueError: a variable, or the file, holds what is not allowed.
    """
    table = next((measured for name, measured in MEASURED.items() if library.startswith(name)), WINDOW_FROM)
    between, moved = BETWEEN_FROM, MOVED_FROM
    if path := _config.get("MPICOLL_TUNING"):
        tuned = load(Path(path))
        table, between = {**table, **tuned[WITHIN]}, {**between, **tuned[BETWEEN]}
    if (everywhere := _config.get("MPICOLL_WINDOW_FROM")) is not None:
        table = {operation: {2: everywhere} for operation in WINDOW_FROM}
        between, moved = {operation: {2: everywhere} for operation in BETWEEN_FROM}, everywhere
    return Choices(
        window_bytes=_config.get("MPICOLL_WINDOW_BYTES"),
        node_size=_config.get("MPICOLL_NODE_SIZE"),
        window_from=table,
        between_from=between,
        moved_from=moved,
    )


def load(path: Path) -> dict[str, dict[str, dict[int, int]]]:
    """The tables that ``bench tune`` has written: WITHIN a node, by ranks, and BETWEEN nodes, by nodes.

    Raises: ValueError: there is no such file, or it holds neither.
    """
    try:
        file = json.loads(path.read_text())
        tables = {name: file[name] for name in (WITHIN, BETWEEN) if name in file}
        if not tables:
            raise ValueError(f"neither {WITHIN} nor {BETWEEN} is in it")
        if unknown := {operation for table in tables.values() for operation in table} - set(WINDOW_FROM):
            raise ValueError(f"no operation that goes through a window: {', '.join(sorted(unknown))}")
        return {
            name: {op: {int(n): int(size) for n, size in sizes.items()} for op, sizes in tables.get(name, {}).items() if sizes}
            for name in (WITHIN, BETWEEN)
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"MPICOLL_TUNING={path}: not a table of `python -m mpicoll.bench tune`: {type(error).__name__}: {error}"
        ) from error


def all_gather(nbytes: Sequence[int]) -> Literal["even", "uneven", "pairs"]:
    """``nbytes``: the size of every rank's block, which every rank knows from its list of outputs."""
    if min(nbytes) == max(nbytes):
        return "even"
    return "uneven" if sum(nbytes) <= LARGEST_DISPLACEMENT else "pairs"
