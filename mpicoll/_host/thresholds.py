"""Which algorithm carries a collective out: pure functions of values that are equal on every rank of the group.

    native          one MPI call                                            small operations, and whatever nothing below can do
    shared_memory   the node's window                                       all ranks on one node
    hierarchical    the window within nodes, MPI between them               several nodes, some with several ranks
    direct          ranks swap slices, torch reduces                        half precision without a window
    pairwise        a message for each pair of ranks                        sizes that differ

The sizes from which one takes over from another are a table, measured (``python -m mpicoll.bench tune`` writes one for a
machine); rank 0's table is used by all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpicoll import _config
from mpicoll._algorithms.window import LINE, parts

NATIVE, SHARED_MEMORY, HIERARCHICAL, DIRECT, PAIRWISE = "native", "shared_memory", "hierarchical", "direct", "pairwise"
PAGE = 4096  # bytes

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

# Bytes that one rank reduces for all, from which half precision is reduced by direct exchange rather than by MPI as float32:
# n - 1 messages, some us each, against half of the bytes. From 64 KiB on two ranks it is ahead, from 1 MiB on 1.5 to 8 times
# (Open MPI and MPICH, two hosts and one).
DIRECT_FROM = 32 << 10


@dataclass(frozen=True)
class Choices:
    """Settings that all ranks share: those of rank 0.

    Attributes:
        window_bytes: The most memory that the window of one group takes on a node; 0: no windows.
        chunk_bytes: The most that a rank writes into the window at a time.
        node_size: Number of ranks of a pretended node; 0: nodes as they are.
        window_from: As WINDOW_FROM.
        between_from: As BETWEEN_FROM.
        direct_from: As DIRECT_FROM.
    """

    window_bytes: int = 64 << 20
    chunk_bytes: int = 1 << 20
    node_size: int = 0
    window_from: Mapping[str, Mapping[int, int]] = field(default_factory=lambda: WINDOW_FROM)
    between_from: Mapping[str, Mapping[int, int]] = field(default_factory=lambda: BETWEEN_FROM)
    direct_from: int = DIRECT_FROM

    def chunk(self, ranks: int) -> int:
        """Bytes of a slot in a window of so many ranks."""
        return min(self.chunk_bytes, self.window_bytes // parts(ranks)) // PAGE * PAGE

    def least(self, operation: str, ranks: int) -> int:
        """Bytes from which ``operation`` goes through the window of so many ranks; NEVER: not at all."""
        if ranks < 2 or self.window_bytes <= 0:
            return NEVER
        return _next_lower(self.window_from[operation], ranks)

    def least_between(self, operation: str, sizes: Sequence[int]) -> int:
        """Bytes from which ``operation`` takes the hierarchical way over nodes of so many ranks; NEVER: not at all."""
        uneven = min(sizes) != max(sizes)
        if max(sizes) < 2 or self.window_bytes <= 0 or (uneven and operation in EVEN):
            return NEVER
        # Over nodes, these two need a piece for every rank of the group in a slot.
        if operation in EVEN and self.chunk(max(sizes)) < LINE * max(sizes) * len(sizes):
            return NEVER
        return _next_lower(self.between_from[operation], len(sizes))


@dataclass(frozen=True)
class Thresholds:
    """What the choice of algorithms in one group depends on; equal on all its ranks.

    Attributes:
        windows: SHARED_MEMORY on one node, HIERARCHICAL on several, None: there are no windows.
        least: Bytes from which an operation goes through windows, by its name in WINDOW_FROM.
        direct_from: Bytes from which half precision that goes through no window is reduced by direct exchange.
    """

    windows: str | None
    least: Mapping[str, int]
    direct_from: int

    def without_windows(self) -> Thresholds:
        """For a group in which a rank could not have its window."""
        return replace(self, windows=None, least=dict.fromkeys(self.least, NEVER))

    def single_call_below(self) -> dict[str, int]:
        """Bytes below which every algorithm but NATIVE is out of the question, by operation."""
        return {**self.least, "halves": min(self.least["halves"], self.direct_from)}


def of_group(choices: Choices, sizes: Sequence[int], possible: bool = True) -> Thresholds:
    """The thresholds of a group.

    Args:
        choices: What all ranks share.
        sizes: Number of ranks on each of the group's nodes.
        possible: False: this MPI's thread level allows no windows.
    """
    size = sum(sizes)
    direct_from = choices.direct_from * size if size > 1 else NEVER
    possible = possible and size > 1 and choices.window_bytes > 0
    if not possible:
        return Thresholds(None, dict.fromkeys(WINDOW_FROM, NEVER), direct_from)
    if len(sizes) == 1:
        return Thresholds(SHARED_MEMORY, {name: choices.least(name, size) for name in WINDOW_FROM}, direct_from)
    least = {name: choices.least_between(name, sizes) for name in WINDOW_FROM}
    return Thresholds(HIERARCHICAL if min(least.values()) < NEVER else None, least, direct_from)


def all_reduce(known: Thresholds, nbytes: int, has_kernel: bool = True, widened: bool = False) -> str:
    """Args: has_kernel: torch can reduce it. widened: MPI would reduce something larger (half precision as float32)."""
    if has_kernel and nbytes >= known.least["halves" if widened else "all_reduce"]:
        return known.windows or NATIVE
    return _native_or_direct(known, nbytes, has_kernel and widened)


def reduce(known: Thresholds, nbytes: int, has_kernel: bool = True) -> str:
    return _windows_from(known, "reduce", nbytes) if has_kernel else NATIVE


def reduce_scatter(known: Thresholds, nbytes: int, has_kernel: bool = True, widened: bool = False, even: bool = True) -> str:
    """Args: nbytes: of all blocks together. even: all blocks are of one size."""
    if not (has_kernel and even):
        return NATIVE
    if nbytes >= known.least["reduce_scatter"]:
        return known.windows or NATIVE
    return _native_or_direct(known, nbytes, widened)


def broadcast(known: Thresholds, nbytes: int) -> str:
    return _windows_from(known, "broadcast", nbytes)


def all_gather(known: Thresholds, sizes: Sequence[int]) -> str:
    """Args: sizes: bytes of each rank's block, which every rank knows from its list of outputs."""
    total, even = sum(sizes), min(sizes) == max(sizes)
    if total >= known.least["all_gather"] and (even or known.windows == SHARED_MEMORY):
        return known.windows or NATIVE
    return NATIVE if even or total <= LARGEST_DISPLACEMENT else PAIRWISE


def all_to_all(known: Thresholds) -> str:
    """Sizes are known to pairs of ranks only, so that they cannot decide."""
    return SHARED_MEMORY if known.windows == SHARED_MEMORY else PAIRWISE


def _windows_from(known: Thresholds, operation: str, nbytes: int) -> str:
    return (known.windows or NATIVE) if nbytes >= known.least[operation] else NATIVE


def _native_or_direct(known: Thresholds, nbytes: int, widened: bool) -> str:
    return DIRECT if widened and nbytes >= known.direct_from else NATIVE


def _next_lower(known: Mapping[int, int], number: int) -> int:
    return known[max((n for n in known if n <= number), default=min(known))]


def choices(library: str = "") -> Choices:
    """This rank's: the table of MPICOLL_TUNING, or the one above, and the variables that override it.

    Args:   library: what the MPI says of itself, beginning with its name.
    Raises: ValueError: a variable, or the file, holds what is not allowed.
    """
    table = next((measured for name, measured in MEASURED.items() if library.startswith(name)), WINDOW_FROM)
    between, direct = BETWEEN_FROM, DIRECT_FROM
    if path := _config.get("MPICOLL_TUNING"):
        tuned = load(Path(path))
        table, between = {**table, **tuned[WITHIN]}, {**between, **tuned[BETWEEN]}
    if (everywhere := _config.get("MPICOLL_WINDOW_FROM")) is not None:
        table = {operation: {2: everywhere} for operation in WINDOW_FROM}
        between, direct = {operation: {2: everywhere} for operation in BETWEEN_FROM}, everywhere
    return Choices(
        window_bytes=_config.get("MPICOLL_WINDOW_BYTES"),
        node_size=_config.get("MPICOLL_NODE_SIZE"),
        window_from=table,
        between_from=between,
        direct_from=direct,
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
