"""The choice of algorithms: pure functions of values that are equal on every rank of the group.

    native          one MPI call                                            small operations, and those that no other one can do
    shared_memory   the node's window                                       all ranks on one node
    hierarchical    the window within nodes, MPI between them               several nodes, some with several ranks
    direct          ranks swap slices, torch reduces                        one rank on each node; half precision without a window
    pairwise        a message for each pair of ranks                        sizes that differ

A measured table holds the sizes from which one algorithm replaces another (``python -m mpicoll.bench tune`` writes one for a
machine). All ranks use rank 0's table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpicoll._algorithms.window import LINE, parts
from mpicoll._base import config

NATIVE, SHARED_MEMORY, HIERARCHICAL, DIRECT, PAIRWISE = "native", "shared_memory", "hierarchical", "direct", "pairwise"
PAGE = 4096  # bytes
WORK = 128 << 10  # bytes of float32 for a thread: torch takes no more threads than there are 32,768 elements for

LARGEST_DISPLACEMENT = 2**31 - 1  # MPI's displacements are C ints
NEVER = 1 << 62  # bytes

# Bytes from which the window is faster than MPI's own algorithm, by the number of ranks on the node (the next lower entry
# counts). `bench tune` found them with 2 and with 4 ranks on 2 cores. MPIs differ by factors; an MPI without a table uses the
# larger figure. "halves": all_reduce of bfloat16 and float16, which MPI reduces as float32. Open MPI keeps a core busy while it
# waits, so that its own all_reduce also slows down a computation beside it. With nothing beside it, that of 2 ranks is the
# faster one up to 8 MiB (1 MiB: 1.06 times raw MPI, by the window 1.24). But a step of DDP with buckets of 4 MiB took 17.7 ms
# more than its computation with it, and 7.6 to 10 ms more with the window.
MEASURED: dict[str, dict[str, dict[int, int]]] = {
    "Open MPI": {  # 5.0.11
        "all_reduce": {2: 1 << 20, 4: 512 << 10},
        "halves": {2: 1, 4: 1},
        "reduce": {2: 1 << 20, 4: 1 << 20},
        "reduce_scatter": {2: 256 << 10, 4: 512 << 10},
        "all_gather": {2: 1 << 20, 4: 1 << 20},
        "broadcast": {2: 512 << 10, 4: 128 << 10},
    },
    "MPICH": {  # 5.0.2
        "all_reduce": {2: 64 << 10, 4: 1 << 10},
        "halves": {2: 1, 4: 1},
        "reduce": {2: 32 << 10, 4: 16 << 10},
        "reduce_scatter": {2: 64 << 10, 4: 256 << 10},
        "all_gather": {2: 256 << 10, 4: 128 << 10},
        "broadcast": {2: 8 << 10, 4: 8 << 10},
    },
}

# The same among more ranks than were measured, by benchmarks/model.py: bytes for each rank from which reductions use the window.
# A rank that reduces calls a kernel for the part of each rank, 2.3 us each. Up to 64 KiB its time grows with the ranks and not
# with the bytes.
EACH_FROM = {"all_reduce": 1 << 10, "halves": 1 << 10, "reduce": 1 << 10, "reduce_scatter": 2 << 10}


def _for_many(table: Mapping[str, Mapping[int, int]]) -> dict[str, Mapping[int, int]]:
    """Returns a measured table with entries for many ranks."""
    many = (8, 16, 32, 64, 128, 256)
    return {
        operation: {**sizes, **{n: max(_next_lower(sizes, n), n * EACH_FROM.get(operation, 0)) for n in many}}
        for operation, sizes in table.items()
    }


def _next_lower(known: Mapping[int, int], number: int) -> int:
    return known[max((n for n in known if n <= number), default=min(known))]


WINDOW_FROM = _for_many(
    {
        operation: {n: max(table[operation][n] for table in MEASURED.values()) for n in sizes}
        for operation, sizes in MEASURED["MPICH"].items()
    }
)

# Bytes from which the hierarchical algorithm is faster, by the same names and by the number of nodes (the next lower entry
# counts): measured for up to 4 nodes, by benchmarks/model.py for more.
#
# The algorithms of MPI take log2(n) to n - 1 latencies of the network among n ranks, whichever ranks share a node. The
# hierarchical ones take the latencies for the nodes alone, and every byte crosses the network as often as it must: each of the
# k ranks of a node sends 1/k. Their cost is synchronisation in the window, some 10 us each time. Measured with two ranks on
# each of two hosts (namespaces with TCP between them, 2 cores in all, Open MPI 5.0.11): from 4 MiB on they are 1.6 to 4 times
# faster.
BETWEEN_FROM: dict[str, dict[int, int]] = {
    "all_reduce": {2: 64 << 10, 5: 1 << 20, 9: 4 << 20},
    "halves": {2: 64 << 10, 5: 1 << 20, 9: 4 << 20},
    "reduce": {2: 128 << 10, 5: 1 << 20, 9: 4 << 20},
    "reduce_scatter": {2: 512 << 10, 5: 4 << 20},  # here MPI also sends each byte only once
    "all_gather": {2: 128 << 10, 5: 4 << 20, 65: 16 << 20},
    "broadcast": {2: 128 << 10, 5: 4 << 20, 257: 16 << 20},
}
MEASURED_NODES = 4  # of groups of more nodes the model decides
# Between more nodes a window has larger slots, up to so many of `chunk_bytes`: for each of them the network's latency passes.
BETWEEN_CHUNKS = 4
WITHIN, BETWEEN, APART = "window_from", "between_from", "apart_from"  # names of these tables in a file
TABLES = (WITHIN, BETWEEN, APART)
EVEN = frozenset({"reduce_scatter", "all_gather"})  # they need equally many ranks on each node

# Bytes for each rank from which direct exchange is faster, if each rank of the group has a node of its own. By the number of
# nodes (the next lower entry counts). Up to 4 as measured on 2 and 4 hosts (namespaces, 1 Gbit/s between them, 2 cores in all,
# Open MPI 5.0.11), where direct exchange of 64 KiB to 1 MiB takes a tenth of MPI's time on 4. More by benchmarks/model.py: to
# send and to receive a message takes a rank some 5 us in Python, in which a card of 100 Gbit/s sends 60 KiB; below, MPI's
# algorithms have fewer messages.
#
# Among more than 32 or 64 ranks MPI reduces. A slice has at most 1 / ranks of a chunk (`direct.CHUNK`), so the messages get
# shorter with every rank, and there is no size from which they take less time.
#
# "halves" holds by the number of ranks wherever half precision uses no window. MPI reduces it as float32: direct exchange saves
# half of the bytes. Measured on two ranks, it is 1.5 to 8 times as fast from 1 MiB on (Open MPI and MPICH, two hosts and one).
APART_FROM: dict[str, dict[int, int]] = {
    "all_reduce": {2: 32 << 10, 3: 16 << 10, 5: 1 << 20, 16: 256 << 10, 65: NEVER},
    "halves": {2: 32 << 10, 3: 16 << 10, 5: 64 << 10, 129: NEVER},
    "reduce": {2: 32 << 10, 3: 16 << 10, 5: 1 << 20, 16: 256 << 10, 65: NEVER},
    "reduce_scatter": {2: 32 << 10, 3: 16 << 10, 5: 2 << 20, 16: 512 << 10, 33: NEVER},
    "all_gather": {2: 32 << 10, 3: 16 << 10, 5: 1 << 20},
    "broadcast": {2: 32 << 10, 3: 16 << 10, 5: 512 << 10},
}


def _pays_between(operation: str, ranks: int, nodes: int, chunk: int) -> bool:
    """False where the hierarchical algorithm is slower than MPI at any size, by the model.

    In two operations a slot has a piece for each node, or for each rank: short ones cost more in calls than in bytes. In the
    others a piece waits for some latencies of the network for each doubling of the nodes.
    """
    doublings = (nodes - 1).bit_length()
    least = {"all_gather": (8 << 10) * nodes, "reduce_scatter": (4 << 10) * nodes * ranks, "broadcast": (512 << 10) * doublings}
    return chunk >= least.get(operation, (448 << 10) * doublings) and (
        ranks >= 4 or operation in ("all_reduce", "halves", "reduce")
    )


class Choices(NamedTuple):
    """The settings of rank 0, which all ranks share."""

    window_bytes: int = 64 << 20  # upper limit of the memory of one group's window on a node; 0: no windows
    chunk_bytes: int = 1 << 20  # upper limit of what a rank of one thread writes into the window at a time
    node_size: int = 0  # number of ranks of a simulated node; 0: the real nodes
    window_from: Mapping[str, Mapping[int, int]] = WINDOW_FROM
    between_from: Mapping[str, Mapping[int, int]] = BETWEEN_FROM
    apart_from: Mapping[str, Mapping[int, int]] = APART_FROM

    def chunk(self, ranks: int, nodes: int = 1, threads: int = 1) -> int:
        """Returns the bytes of a slot in a window of so many ranks, each with so many threads, of a group on so many nodes.

        A rank's slice of it has work for all threads, within ``window_bytes``: 64 MiB suffice for 4 ranks of 11 threads.
        """
        wanted = max(self.chunk_bytes, ranks * threads * WORK) if threads > 1 else self.chunk_bytes
        wanted = max(wanted, self.chunk_bytes * BETWEEN_CHUNKS) if nodes > MEASURED_NODES else wanted
        return min(wanted, self.window_bytes // parts(ranks)) // PAGE * PAGE

    def least(self, operation: str, ranks: int) -> int:
        """Returns the bytes from which ``operation`` uses the window of so many ranks, or NEVER."""
        if ranks < 2 or self.window_bytes <= 0:
            return NEVER
        return _next_lower(self.window_from[operation], ranks)

    def least_between(self, operation: str, sizes: Sequence[int]) -> int:
        """Returns the bytes from which ``operation`` is hierarchical over nodes of so many ranks, or NEVER."""
        uneven, ranks, nodes = min(sizes) != max(sizes), max(sizes), len(sizes)
        if ranks < 2 or self.window_bytes <= 0 or (uneven and operation in EVEN):
            return NEVER
        chunk, least = self.chunk(ranks, nodes), self.between_from[operation]
        # Over nodes, these two operations need a piece for every rank of the group in a slot.
        if operation in EVEN and chunk < LINE * ranks * nodes:
            return NEVER
        if nodes > MEASURED_NODES and least == BETWEEN_FROM[operation] and not _pays_between(operation, ranks, nodes, chunk):
            return NEVER
        return _next_lower(least, nodes)

    def least_apart(self, operation: str, ranks: int) -> int:
        """Returns the bytes from which ``operation`` is a direct exchange of so many ranks, or NEVER."""
        return min(NEVER, _next_lower(self.apart_from[operation], ranks) * ranks) if ranks > 1 else NEVER


class Thresholds(NamedTuple):
    """The values by which one group chooses its algorithms. They are equal on all its ranks."""

    large: str | None  # SHARED_MEMORY on one node, HIERARCHICAL on several, DIRECT on nodes of one rank each; None: MPI's own
    least: Mapping[str, int]  # bytes from which an operation uses this algorithm, by its name in WINDOW_FROM
    direct_from: int  # bytes from which half precision is reduced by direct exchange, if it does not use a window

    def without_windows(self) -> Thresholds:
        """Returns the thresholds for a group in which a rank could not make its window."""
        return self._replace(large=None, least=dict.fromkeys(self.least, NEVER))

    def single_call_below(self) -> dict[str, int]:
        """Returns the bytes below which the algorithm is always NATIVE, by operation."""
        return {**self.least, "halves": min(self.least["halves"], self.direct_from)}


def of_group(choices: Choices, sizes: Sequence[int], possible: bool = True) -> Thresholds:
    """Returns the thresholds of a group with ``sizes`` ranks on its nodes. ``possible``: the thread level allows windows."""
    size = sum(sizes)
    direct_from = choices.least_apart("halves", size)
    if len(sizes) > 1 and max(sizes) == 1:
        return Thresholds(DIRECT, {name: choices.least_apart(name, size) for name in WINDOW_FROM}, direct_from)
    possible = possible and size > 1 and choices.window_bytes > 0
    if not possible:
        return Thresholds(None, dict.fromkeys(WINDOW_FROM, NEVER), direct_from)
    if len(sizes) == 1:
        return Thresholds(SHARED_MEMORY, {name: choices.least(name, size) for name in WINDOW_FROM}, direct_from)
    least = {name: choices.least_between(name, sizes) for name in WINDOW_FROM}
    return Thresholds(HIERARCHICAL if min(least.values()) < NEVER else None, least, direct_from)


def all_reduce(known: Thresholds, nbytes: int, has_kernel: bool = True, widened: bool = False) -> str:
    """Returns the algorithm of an all_reduce, as the other functions do for their operations.

    Args:
        nbytes: Bytes of the tensor; for reduce_scatter, of all blocks together.
        has_kernel: torch can reduce it.
        widened: MPI would reduce larger elements (half precision as float32).
    """
    if has_kernel and nbytes >= known.least["halves" if widened else "all_reduce"]:
        return known.large or NATIVE
    return _native_or_direct(known, nbytes, has_kernel and widened)


def reduce(known: Thresholds, nbytes: int, has_kernel: bool = True) -> str:
    return _windows_from(known, "reduce", nbytes) if has_kernel else NATIVE


def reduce_scatter(known: Thresholds, nbytes: int, has_kernel: bool = True, widened: bool = False, even: bool = True) -> str:
    if not (has_kernel and even):
        return NATIVE
    # Within a node, what makes all_reduce of half precision faster makes this one faster, too.
    if nbytes >= known.least["halves" if widened and known.large == SHARED_MEMORY else "reduce_scatter"]:
        return known.large or NATIVE
    return _native_or_direct(known, nbytes, widened)


def broadcast(known: Thresholds, nbytes: int) -> str:
    return _windows_from(known, "broadcast", nbytes)


def all_gather(known: Thresholds, sizes: Sequence[int]) -> str:
    """Returns the algorithm of an all_gather. Every rank knows the bytes of each block from its list of outputs."""
    total, even = sum(sizes), min(sizes) == max(sizes)
    if total >= known.least["all_gather"] and (even or known.large in (SHARED_MEMORY, DIRECT)):
        return known.large or NATIVE
    return NATIVE if even or total <= LARGEST_DISPLACEMENT else PAIRWISE


def all_to_all(known: Thresholds) -> str:
    """Returns the algorithm of an all_to_all. Only pairs of ranks know their sizes, so sizes cannot decide."""
    return SHARED_MEMORY if known.large == SHARED_MEMORY else PAIRWISE


def _windows_from(known: Thresholds, operation: str, nbytes: int) -> str:
    return (known.large or NATIVE) if nbytes >= known.least[operation] else NATIVE


def _native_or_direct(known: Thresholds, nbytes: int, widened: bool) -> str:
    return DIRECT if widened and nbytes >= known.direct_from else NATIVE


def choices(library: str = "") -> Choices:
    """Returns this rank's settings: the table of MPICOLL_TUNING or the one above, and the variables that override it.

    Args:
        library: The version text of the MPI library, which begins with its name.

    Raises:
        ValueError: A variable or the file has a value that is not allowed.
    """
    table = next((_for_many(measured) for name, measured in MEASURED.items() if library.startswith(name)), WINDOW_FROM)
    between, apart = BETWEEN_FROM, APART_FROM
    if path := config.get("MPICOLL_TUNING"):
        tuned = load(Path(path))
        table, between, apart = {**table, **tuned[WITHIN]}, {**between, **tuned[BETWEEN]}, {**apart, **tuned[APART]}
    if (everywhere := config.get("MPICOLL_WINDOW_FROM")) is not None:
        table = {operation: {2: everywhere} for operation in WINDOW_FROM}
        between = {operation: {2: everywhere} for operation in BETWEEN_FROM}
        apart = {operation: {2: everywhere} for operation in APART_FROM}
    return Choices(
        window_bytes=config.get("MPICOLL_WINDOW_BYTES"),
        node_size=int(os.environ.get("_MPICOLL_NODE_SIZE", 0)),  # of pretended nodes, for tests; 0: real ones
        window_from=table,
        between_from=between,
        apart_from=apart,
    )


def load(path: Path) -> dict[str, dict[str, dict[int, int]]]:
    """Returns the tables that ``bench tune`` has written.

    WITHIN a node, by its ranks; BETWEEN nodes, by their number; APART: nodes with one rank each, by their number, in bytes for
    each rank.

    Raises:
        ValueError: There is no such file, or it holds no table.
    """
    try:
        file = json.loads(path.read_text())
        tables = {name: file[name] for name in TABLES if name in file}
        if not tables:
            raise ValueError(f"none of {', '.join(TABLES)} is in it")
        if unknown := {operation for table in tables.values() for operation in table} - set(WINDOW_FROM):
            raise ValueError(f"no operation that has a threshold: {', '.join(sorted(unknown))}")
        return {
            name: {op: {int(n): int(size) for n, size in sizes.items()} for op, sizes in tables.get(name, {}).items() if sizes}
            for name in TABLES
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"MPICOLL_TUNING={path}: not a table of `python -m mpicoll.bench tune`: {type(error).__name__}: {error}"
        ) from error
