"""Computes how long collectives take on many ranks: ``python -m benchmarks.model`` compares mpicoll's default with MPI.

An event loop gives times to what tests/host/recorder.py records, by LogGP: latency, overhead of a call, and for each message and
each byte the time in which it occupies the sender's card and the receiver's. The ranks of a node share a card and the memory's
bandwidth. MPI is modelled by the algorithms of textbooks, in C. The fastest of them counts, as if the MPI were tuned.

    all ranks     each rank's record is played: small groups, and operations with a root
    one rank      the record of one rank, if all ranks do the same: a message to the rank d places behind it arrives when that
                  of the rank d places before it does, and occupies the card for all ranks of a node that do this

Left out: links between the switches (simgrid.py adds them), ranks that come late, caches, and memory of several sockets.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch

from mpicoll._host import algorithm_choice
from mpicoll._host.algorithm_choice import NEVER, WINDOW_FROM, Choices
from tests.host.recorder import Job, Record

KIB, MIB = 1 << 10, 1 << 20


class Network(NamedTuple):
    """Seconds, between two ranks of different nodes."""

    latency: float
    overhead: float  # of MPI's code, at each end of a message
    per_message: float  # at a card
    per_byte: float


# TCP: 8 bytes between two hosts of docs/performance.md (namespaces) take mpi4py 7 to 11 us; a card and a switch add some.
# InfiniBand: below 1 us and 100 Gbit/s (D. K. Panda, slides of SC 2018, for EDR); about 100 million messages a second.
# Slingshot: 0.35 us for each of up to three switches, De Sensi et al., SC 2020 (arXiv 2008.08886); 200 Gbit/s with Cassini cards.
NETWORKS = {
    "TCP 10 Gbit/s": Network(15e-6, 3e-6, 1e-6, 1 / 1.18e9),
    "InfiniBand 100 Gbit/s": Network(0.9e-6, 0.2e-6, 10e-9, 1 / 12.1e9),
    "Slingshot 200 Gbit/s": Network(1.6e-6, 0.3e-6, 20e-9, 1 / 23e9),
}

# Seconds on one core, measured with Open MPI 5.0.11, torch 2.13.0 and Python 3.11 on 2 cores. Irecv, Isend and two waits take
# 4.8 us, memmove of 64 bytes 0.9 us, torch.add into a given tensor 2 to 3 us for each operand.
CALL = 1.2e-6  # of MPI, from Python
COPY = 0.8e-6  # of memmove
OPERAND = 2.3e-6  # of a kernel: torch.add, and a view of the window
WORD, LOOK = 0.1e-6, 1e-6  # to look at the word of one rank, and for each such look at all of them
PATH = 5e-6  # from the choice of an algorithm of mpicoll to its first step
# Within a node, in C: overhead and latency of a message. A message of 8 bytes takes 0.3 to 0.5 us between two cores.
STEP, NEAR = 0.15e-6, 0.2e-6
# Bytes per second: what one core copies from or to memory, what all cores of a node do together (two sockets of 64 cores; STREAM
# counts a copied byte twice), and what one core reduces in its cache. A message within a node is copied twice.
CORE, MEMORY, CACHE = 10e9, 150e9, 17e9
CACHED = 1 << 20  # bytes; MPI reduces more of them in memory
# How many times as long as the textbook's algorithms a real MPI takes on one node. Open MPI 5.0.10 with 8 ranks on one EPYC 9654
# (docs/guides/after-gloo.md has the source): 7 times for 4 KiB, 4.8 for 256 KiB, 3.9 for 4 MiB, 2.5 for 64 MiB.
REAL = 4


# -- algorithms of MPI ----------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """A rank sends ``nbytes`` to one at ``distance``, gets as many from one, and reduces ``reduced`` of them; so ``times``."""

    distance: int
    nbytes: float
    reduced: float = 0
    leaders: bool = False  # one rank of each node does it
    times: int = 1
    around: bool = False  # a ring: one rank of each node sends to another node


def distances(size: int) -> list[int]:
    return [1 << k for k in range((size - 1).bit_length())]


def doubling(size: int, nbytes: float, reduced: bool = True) -> list[Round]:
    """Recursive doubling. The ranks beyond a power of two give theirs to others first, and get the result at the end."""
    inner = [Round(d, nbytes, nbytes * reduced) for d in distances(size)]
    return inner if size & (size - 1) == 0 else [*inner, Round(1, nbytes)]


def halving(size: int, nbytes: float) -> list[Round]:
    """Recursive halving, with the nearest rank first, as Rabenseifner's algorithm does it."""
    return [Round(d, nbytes / (2 * d), nbytes / (2 * d)) for d in distances(size)]


def gathering(rounds: list[Round]) -> list[Round]:
    """The way back."""
    return [each._replace(reduced=0) for each in reversed(rounds)]


def tree(size: int, nbytes: float) -> list[Round]:
    """A binomial tree; the root's children on other nodes come first, so that one rank of a node sends to others."""
    return [Round(d, nbytes, leaders=True) for d in reversed(distances(size))]


def ring(size: int, nbytes: float) -> list[Round]:
    return [Round(1, nbytes / size, times=size - 1, around=True)]


def pairwise(size: int, nbytes: float, reduced: bool, ranks_per_node: int) -> list[Round]:
    """With each other rank in turn; those of this rank's node first."""
    block, near = nbytes / size, min(size, ranks_per_node) - 1
    return [Round(d, block, block * reduced, times=times) for d, times in ((1, near), (size // 2, size - 1 - near)) if times]


def all_reduces(p: int, n: float, k: int) -> list[list[Round]]:
    leaders = [each._replace(distance=each.distance * k, leaders=True) for each in doubling(p // k, n)]
    up = [each._replace(reduced=n) for each in reversed(tree(k, n))]
    return [doubling(p, n), [*halving(p, n), *gathering(halving(p, n))], [*up, *leaders, *tree(k, n)]]


def broadcasts(p: int, n: float, k: int) -> list[list[Round]]:
    scattered = [each._replace(nbytes=n * each.distance / p) for each in tree(p, n)]
    return [tree(p, n), [*scattered, *ring(p, n)], [*scattered, *(Round(d, n * d / p) for d in distances(p))]]


def reduces(p: int, n: float, k: int) -> list[list[Round]]:
    return [[each._replace(reduced=n) for each in reversed(tree(p, n))], [*halving(p, n), *gathering(halving(p, n))]]


def all_gathers(p: int, n: float, k: int) -> list[list[Round]]:
    bruck = [Round(d, min(d, p - d) * n / p) for d in distances(p)]
    own = Round(0, n / p)
    return [[own, *bruck], [own, *ring(p, n)]]


def reduce_scatters(p: int, n: float, k: int) -> list[list[Round]]:
    far_first = [Round(d, n * d / p, n * d / p) for d in reversed(distances(p))]  # the blocks stay in the order of the ranks
    return [far_first, pairwise(p, n, True, k)]


def all_to_alls(p: int, n: float, k: int) -> list[list[Round]]:
    return [[Round(d, n / 2) for d in distances(p)], pairwise(p, n, False, k)]


# By the names of MPI's functions. Ranks, bytes of all blocks together, ranks of a node. MPICH chooses among these (Thakur,
# Rabenseifner and Gropp 2005), Open MPI's "tuned" among these and variants of them. All blocks have one size.
TEXTBOOK: dict[str, Callable[[int, float, int], list[list[Round]]]] = {
    "allreduce": all_reduces,
    "bcast": broadcasts,
    "reduce": reduces,
    "allgather": all_gathers,
    "reduce_scatter": reduce_scatters,
    "reduce_scatter_block": reduce_scatters,
    "alltoall": all_to_alls,
}


# -- the event loop ------------------------------------------------------------------------------------------------------

Key: TypeAlias = "tuple[Any, ...]"
# What a rank does, in its order:
#   ("busy", seconds)
#   ("send", number, key, nbytes, leaving, from, to)    leaving: ranks whose message occupies the card; from, to: numbers of nodes
#   ("receive", key, number)                            posts a receive
#   ("sent", number)                                    waits until the card, or the core, has sent it
#   ("announce", key)                                   arrives at once
#   ("await", key, number)                              waits for the arrival of this number under this key
Program: TypeAlias = "Iterator[tuple[Any, ...]]"


def run(programs: Mapping[int, Program], network: Network, rate: float) -> float:
    """Returns the seconds after which the last rank ends. ``rate``: bytes per second that each rank copies."""
    out, into, core = defaultdict[int, float](float), defaultdict[int, float](float), defaultdict[int, float](float)
    sent: dict[tuple[int, int], float] = {}
    arrived: dict[Key, list[float]] = defaultdict(list)
    waiting: dict[tuple[Key, int], list[int]] = defaultdict(list)
    # (time, number, what): a rank goes on, or a message (key, seconds, node) is at the receiver's card.
    queue: list[tuple[float, int, Any]] = [(0.0, number, rank) for number, rank in enumerate(programs)]
    number, last = len(queue), 0.0

    def push(at: float, what: Any) -> None:
        nonlocal number
        number += 1
        heapq.heappush(queue, (at, number, what))

    def arrive(key: Key, at: float) -> None:
        arrived[key].append(at)
        for rank in waiting.pop((key, len(arrived[key]) - 1), ()):
            push(at, rank)

    def step(rank: int, now: float, kind: str, of: Sequence[Any]) -> float | None:
        """Returns the time at which the rank goes on, or None: it waits."""
        if kind == "busy":
            now += of[0]
        elif kind == "send":
            event, key, nbytes, leaving, source, target = of
            if leaving:
                seconds = leaving * (network.per_message + nbytes * network.per_byte)
                start = max(now, out[source])
                sent[rank, event] = out[source] = start + seconds
                push(start + network.latency, (key, seconds, target))
            else:
                sent[rank, event] = core[rank] = max(now, core[rank]) + 2 * nbytes / rate
                arrive(key, core[rank] + NEAR)
        elif kind == "announce":
            arrive(of[0], now)
        elif kind == "sent":
            now = max(now, sent[rank, of[0]])
        elif kind == "receive":
            pass
        elif len(arrived[of[0]]) > of[1]:
            now = max(now, arrived[of[0]][of[1]])
        else:
            waiting[of[0], of[1]].append(rank)
            return None
        return now

    while queue:
        now, _, what = heapq.heappop(queue)
        if isinstance(what, tuple):
            key, seconds, node = what
            into[node] = max(into[node], now) + seconds
            arrive(key, into[node])
            continue
        at: float | None = now
        while at is not None:
            last = max(last, at)
            if queue and at > queue[0][0]:
                push(at, what)
                break
            op = next(programs[what], None)
            at = None if op is None else step(what, at, op[0], op[1:])
    assert not waiting, f"ranks wait for what never comes: {list(waiting)[:4]}"
    return last


def copied_per_second(ranks_per_node: int) -> float:
    return min(CORE, MEMORY / ranks_per_node)


def reduction(nbytes: float, rate: float) -> float:
    """Returns the seconds in which MPI reduces so many bytes."""
    return nbytes / (CACHE if nbytes <= CACHED else rate)


# -- programs ------------------------------------------------------------------------------------------------------------


def of_rounds(rounds: list[Round], size: int, ranks_per_node: int, rails: int, network: Network) -> Program:
    """One rank of an algorithm of MPI, whose messages leave the node together with those of ``rails`` communicators.

    A round at distance 0 copies.
    """
    rate = copied_per_second(ranks_per_node * rails)
    for place, (distance, nbytes, reduced, leaders, times, around) in enumerate(rounds):
        if distance == 0:
            yield "busy", nbytes / rate
        far = size > ranks_per_node and distance >= ranks_per_node
        around = around and size > ranks_per_node > 1
        leaving = rails * (1 if leaders or around else ranks_per_node) if far or around else 0
        overhead = network.overhead if leaving else STEP
        for time in range(times if distance else 0):
            yield "busy", overhead
            yield "send", 0, (place, True), nbytes, leaving, 0, 0
            if around:  # the others send within the node
                yield "send", 0, (place, False), nbytes, 0, 0, 0
                yield "await", (place, False), time
            yield "await", (place, True), time
            yield "busy", overhead + reduction(reduced, rate)


MANY = 64  # equal rounds that are played; the time of more is extrapolated


@cache
def mpi(name: str, size: int, nbytes: int, ranks_per_node: int, rails: int, network: Network) -> float:
    """Returns the seconds of a collective of MPI by its fastest algorithm. ``rails`` communicators call it at the same time."""
    if size == 1:
        return 0.0

    def seconds(rounds: list[Round], most: int) -> float:
        few = [each._replace(times=min(each.times, most)) for each in rounds]
        programs = {0: of_rounds(few, size, ranks_per_node, rails, network)}
        return run(programs, network, copied_per_second(ranks_per_node * rails))

    def extrapolated(rounds: list[Round]) -> float:
        more = sum(max(0, each.times - MANY) for each in rounds)
        played = seconds(rounds, MANY)
        return played + more * (played - seconds(rounds, MANY // 2)) / (MANY // 2) if more else played

    return min(map(extrapolated, TEXTBOOK[name](size, nbytes, ranks_per_node)))


def of_record(record: Record, job: Job, network: Network, alone: bool) -> Program:
    """One rank of mpicoll. ``alone``: the other ranks do the same and are not played."""
    size, per_node, rate = job.ranks, job.ranks_per_node, copied_per_second(job.ranks_per_node)
    rank, node = record.rank, record.rank // per_node
    received, entered = Counter[Key](), Counter[int]()
    ends: dict[int, tuple[Any, ...]] = {}  # what a wait for an event of this number does

    def key_of(comm: str, source: int, target: int) -> Key:
        return (comm, (target - source) % size) if alone else (comm, source, target)

    def leaving(other: int) -> int:
        if not alone:
            return int(other // per_node != node)
        distance = abs(other - rank)
        return min(distance, per_node, size - distance) if job.nodes > 1 else 0

    if any(event.kind != "collective" for event in record.events):
        yield "busy", PATH
    for number, (kind, of, nbytes) in enumerate(record.events):
        if kind == "copy":
            yield "busy", of * COPY + nbytes / rate
        elif kind == "combine":
            yield "busy", of * (OPERAND + nbytes / CACHE)
        elif kind == "reduce_local":
            yield "busy", CALL + nbytes / rate
        elif kind == "send":
            yield "busy", CALL + (network.overhead if leaving(of.rank) else STEP)
            yield "send", number, key_of(of.comm, rank, of.rank), nbytes, leaving(of.rank), node, of.rank // per_node
            ends[number] = "sent", number
        elif kind == "receive":
            yield "busy", CALL
            key = key_of(of.comm, of.rank, rank)
            ends[number] = "await", key, received[key]
            yield "receive", key, received[key]
            received[key] += 1
        elif kind == "wait":
            yield "busy", CALL
            if of in ends:
                yield ends[of]
        elif kind in ("collective", "barrier"):
            name, members, whole = of if kind == "collective" else ("allreduce", of, 0)
            rails = 1 if members == size else per_node
            yield "busy", CALL
            if not alone:
                key = "collective", members, rank % rails, entered[members]
                entered[members] += 1
                yield "announce", key
                yield "await", key, members - 1
            per = per_node if members == size else 1
            yield "busy", mpi(name.removeprefix("I").lower(), members, whole, per, rails, network)
        elif kind == "announce":
            yield "busy", WORD
            if not alone:
                yield "announce", (node, *of)
        else:
            yield "busy", LOOK + WORD * (per_node - 1)
            method, turn = of
            what, turn = {"free": ("take", turn - 2), "await_taken": ("take", turn)}.get(method, ("lay", turn))
            if not alone and turn >= 0:
                yield "await", (node, what, turn), 0 if method == "await_laid_by" else per_node - 1


def played(
    job: Job, operation: str, nbytes: int, dtype: torch.dtype = torch.float32, every_rank: bool = False
) -> Callable[[Network], float]:
    """Records the algorithm that `thresholds` chooses for this job. Returns a function that gives its seconds."""
    one = representative(job, operation)
    records = job.record(operation, nbytes, dtype, None if every_rank else [one]).of
    record = records[one]
    alone = not (every_rank or (operation in ROOTED and record.sends + record.receives))
    if not (alone or every_rank):
        records = job.record(operation, nbytes, dtype).of
    rate = copied_per_second(job.ranks_per_node)
    copies = [event.nbytes for event in record.events if event.kind == "copy"]
    before = copies[0] / rate if operation == "broadcast" and alone and copies else 0.0  # the root lays down the first piece

    def seconds(network: Network) -> float:
        return before + run({rank: of_record(each, job, network, alone) for rank, each in records.items()}, network, rate)

    return seconds


ROOTED = frozenset({"broadcast", "reduce"})  # by rank 1


def representative(job: Job, operation: str) -> int:
    """A rank that does all that others do: where a broadcast has come to, and where a reduction goes to."""
    other_node = operation == "broadcast" and job.nodes > 1 and job.ranks_per_node > 1
    return min(1 + job.ranks_per_node * other_node, job.ranks - 1)


def only_mpi(choices: Choices) -> Choices:
    """The settings by which MPI does all."""
    never = {name: {2: NEVER} for name in WINDOW_FROM}
    return choices._replace(window_from=never, between_from=never, apart_from=never)


def ratios(job: Job, operation: str, nbytes: int, dtype: torch.dtype = torch.float32) -> dict[str, tuple[float, float]]:
    """Returns for each network the seconds that mpicoll takes by its default, and their ratio to the seconds of MPI.

    Between nodes MPI is the textbook's, which no MPI beats; on one node it is as it was measured (`REAL`).
    """
    ours = played(job, operation, nbytes, dtype)
    theirs = played(job._replace(choices=only_mpi(job.choices)), operation, nbytes, dtype)
    times = {name: (ours(network), theirs(network) * (REAL if job.nodes == 1 else 1)) for name, network in NETWORKS.items()}
    return {name: (own, own / mpi) for name, (own, mpi) in times.items()}


# -- the script ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="prints times of collectives by the model, and their ratio to the times of MPI")
    parser.add_argument("operations", nargs="*", default=["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--ranks-per-node", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--bytes", type=int, nargs="+", default=[64 * KIB, MIB, 16 * MIB, 64 * MIB])
    parser.add_argument("--own", action="store_true", help="mpicoll's algorithms from the first byte on, not its choice")
    options = parser.parse_args()
    always = {name: {2: 1} for name in WINDOW_FROM}
    choices = algorithm_choice.choices()
    if options.own:
        choices = choices._replace(window_from=always, between_from=always, apart_from=always)
    for operation in options.operations:
        print(f"{operation}: microseconds (x MPI)".ljust(52), *(f"{nbytes >> 10:>10} KiB    " for nbytes in options.bytes))
        for nodes in options.nodes:
            for per_node in options.ranks_per_node:
                job = Job(nodes * per_node, per_node, choices)
                whole = 4 * job.ranks  # bytes: an element for each rank
                found = [ratios(job, operation, -(-nbytes // whole) * whole) for nbytes in options.bytes]
                for name in NETWORKS:
                    row = (f"{1e6 * times[name][0]:12.0f} ({times[name][1]:5.2f})" for times in found)
                    print(f"{nodes:5} nodes of {per_node:3}, {name:32}", *row, flush=True)


if __name__ == "__main__":
    main()
