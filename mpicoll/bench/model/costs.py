"""The cost of each algorithm by the Hockney model, on nodes whose ranks share a network card and the memory.

A message costs a latency plus its bytes divided by a bandwidth. A step of an algorithm takes as long as its slowest message, and
steps do not overlap. Ranks are numbered node by node. The symbols of docs/model.md are, here:

    n bytes                          all_reduce, broadcast: the tensor; else: the parts of all ranks together, on one rank
    nodes, ranks, size               N, R, p = N R
    outward(k, b) = M(k, b)          k ranks of every node each send b bytes to other nodes, at once
    inward(b) = L(b)                 every rank of a node sends b bytes to another rank of the node, at once, by MPI
    reducing(b) = gamma b            every rank adds b bytes to b others
    handing_over() = h               every rank of a window tells all others that its part is ready

Where an algorithm needs a power of two, other numbers of ranks fold: neighbours add up first and share the result at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from mpicoll._algorithms import direct
from mpicoll._algorithms.window import LINE
from mpicoll._host.thresholds import Choices

KERNEL_CALLS = 3  # Python calls for each part: two make it a tensor, one adds it


@dataclass(frozen=True)
class ModelMachine:
    """A modelled machine: equal nodes, and a network whose only bottleneck is the card of each node.

    Args:
        nodes: Number of nodes.
        ranks: Ranks per node.
        latency_s: Of a message between nodes.
        bandwidth: Bytes per second of the card of a node, in each direction.
        gap_s: Time between two messages of one card.
        node_latency_s: Of a message, or of a word in shared memory, between two ranks of a node.
        memory_bandwidth: Bytes per second that a node reads and writes together.
        core_bandwidth: The same of one core.
        copies: Of a message between ranks of a node: 2 through shared memory, 1 from the memory of the sender (CMA, XPMEM).
        call_s: Of one Python call.
        look_s: Of reading the ready flag of one rank.
        beside: Number of groups of ranks that each node holds and that run the same operation at once (rails).
    """

    nodes: int
    ranks: int
    latency_s: float = 1.5e-6
    bandwidth: float = 12.5e9
    gap_s: float = 0.01e-6
    node_latency_s: float = 0.5e-6
    memory_bandwidth: float = 300e9
    core_bandwidth: float = 20e9
    copies: int = 2
    call_s: float = 1e-6
    look_s: float = 0.03e-6
    beside: int = 1

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    @property
    def chunk(self) -> int:
        """Bytes that a rank writes into a window at a time."""
        return Choices().chunk(self.ranks)

    def outward(self, senders: int, nbytes: float) -> float:
        messages = senders * self.beside
        return self.latency_s + (messages - 1) * self.gap_s + messages * nbytes / self.bandwidth

    def inward(self, nbytes: float) -> float:
        return self.node_latency_s + self.memory(2 * self.copies * nbytes)

    def memory(self, nbytes: float, at_once: float | None = None) -> float:
        """``at_once`` ranks of a node (None: all) each read and write ``nbytes`` together."""
        active = (self.ranks if at_once is None else at_once) * self.beside
        return nbytes * max(1 / self.core_bandwidth, active / self.memory_bandwidth)

    def reducing(self, nbytes: float) -> float:
        return self.memory(3 * nbytes)

    def handing_over(self) -> float:
        return self.node_latency_s + (self.ranks - 1) * self.look_s

    def calls(self, count: float) -> float:
        return count * self.call_s

    def exchange(self, distance: int, nbytes: float) -> float:
        """Ranks whose numbers differ by ``distance``, a power of two, swap ``nbytes``."""
        return self.inward(nbytes) if 2 * distance <= self.ranks else self.outward(self.ranks, nbytes)

    def shift(self, distance: int, nbytes: float) -> float:
        """Every rank sends to the rank ``distance`` after it, modulo the number of ranks."""
        crossing = min(distance, self.size - distance, self.ranks) if self.nodes > 1 else 0
        inside = self.inward(nbytes) if crossing < self.ranks else 0.0
        return max(inside, self.outward(crossing, nbytes) if crossing else 0.0)

    def shifts(self, nbytes: float) -> float:
        """A shift by every distance in turn, each of ``nbytes``."""
        if self.nodes == 1:
            return (self.size - 1) * self.shift(1, nbytes)
        near = sum(self.shift(distance, nbytes) for distance in range(1, self.ranks))
        return 2 * near + (self.size - 2 * self.ranks + 1) * self.shift(self.ranks, nbytes)


Cost = Callable[[ModelMachine, float], float]  # seconds for a number of bytes


def rails(machine: ModelMachine, nbytes: float) -> tuple[ModelMachine, float]:
    """The machine as one rail sees it (ranks with the same local rank), and the bytes of its slice, at least a cache line."""
    count = min(machine.ranks, math.ceil(nbytes / LINE))
    return replace(machine, ranks=1, beside=count), nbytes / count


def _halvings(count: int) -> int:
    """Binary logarithm, rounded down."""
    return count.bit_length() - 1


def _doublings(count: int) -> int:
    """Binary logarithm, rounded up."""
    return (count - 1).bit_length()


def _turns(nbytes: float, chunk: float) -> int:
    return max(1, math.ceil(nbytes / chunk))


def _best(*algorithms: Cost) -> Cost:
    return lambda m, n: min(cost(m, n) for cost in algorithms)


# -- all_reduce --------------------------------------------------------------------------------------------------------


def _folding(m: ModelMachine, nbytes: float, back: float) -> float:
    """Extra steps before and after, where the number of ranks is not a power of two."""
    return 0.0 if m.size.bit_count() == 1 else m.exchange(1, nbytes) + m.reducing(nbytes) + m.exchange(1, back)


def recursive_doubling(m: ModelMachine, n: float) -> float:
    steps = sum(m.exchange(1 << k, n) + m.reducing(n) for k in range(_halvings(m.size)))
    return _folding(m, n, n) + steps


def rabenseifner(m: ModelMachine, n: float) -> float:
    halves = [(1 << k, n / (2 << k)) for k in range(_halvings(m.size))]
    return _folding(m, n, n) + sum(2 * m.exchange(distance, half) + m.reducing(half) for distance, half in halves)


def ring(m: ModelMachine, n: float) -> float:
    return reduce_scatter_ring(m, n) + all_gather_ring(m, n)


best_all_reduce = _best(recursive_doubling, rabenseifner, ring)


def window_flat(m: ModelMachine, n: float) -> float:
    if n > m.chunk:
        return math.inf
    return m.handing_over() + m.calls(KERNEL_CALLS * m.ranks) + m.memory((m.ranks + 3) * n)


def window_sliced(m: ModelMachine, n: float) -> float:
    return window_reduce(m, n) + m.memory(2 * n)


def window_reduce(m: ModelMachine, n: float) -> float:
    """Until the result is in the window."""
    turns = _turns(n, m.chunk / 2)
    read_and_written = 2 * n * (1 - 1 / m.ranks) + n + n / m.ranks
    return (1 + turns) * m.handing_over() + m.calls(turns * KERNEL_CALLS * m.ranks) + m.memory(read_and_written)


def all_reduce_rails(m: ModelMachine, n: float, wider: int = 1) -> float:
    turns = _turns(n, m.chunk / 2)
    between, slice_ = rails(m, n / turns)
    return window_sliced(m, n) + turns * best_all_reduce(between, wider * slice_)


# Half precision: MPI has no sum of it. Between nodes it travels as float32, so that results are rounded once.


def halves_as_float32(m: ModelMachine, n: float) -> float:
    return m.memory(6 * n) + best_all_reduce(m, 2 * n)


def halves_direct(m: ModelMachine, n: float) -> float:
    turns = _turns(n, direct.CHUNK)
    each = all_at_once(m, n / turns) + m.calls(KERNEL_CALLS * m.size) + best_all_gather(m, n / turns)
    return turns * each + m.memory((1 + 1 / m.size) * n)


def halves_rails(m: ModelMachine, n: float) -> float:
    return all_reduce_rails(m, n, 2)


# -- reduce_scatter ----------------------------------------------------------------------------------------------------


def recursive_halving(m: ModelMachine, n: float) -> float:
    """The farthest rank first, so that blocks end in rank order: every rank of a node first sends half of its bytes out."""
    parts = [(1 << k, n * (1 << k) / (1 << _halvings(m.size))) for k in range(_halvings(m.size))]
    steps = sum(m.exchange(distance, part) + m.reducing(part) for distance, part in parts)
    return _folding(m, n, n / m.size) + steps


def reduce_scatter_ring(m: ModelMachine, n: float) -> float:
    part = n / m.size
    return (m.size - 1) * (m.shift(1, part) + m.reducing(part)) if m.size > 1 else 0.0


def reduce_scatter_pairwise(m: ModelMachine, n: float) -> float:
    return m.shifts(n / m.size) + (m.size - 1) * m.reducing(n / m.size)


best_reduce_scatter = _best(recursive_halving, reduce_scatter_ring, reduce_scatter_pairwise)


def window_reduce_scatter(m: ModelMachine, n: float) -> float:
    turns = _turns(n, m.chunk)
    read_and_written = 2 * n * (1 - 1 / m.ranks) + n + n / m.ranks
    calls = m.calls(turns * (KERNEL_CALLS * m.ranks + m.ranks - 1))
    return turns * m.handing_over() + calls + m.memory(read_and_written)


def reduce_scatter_rails(m: ModelMachine, n: float) -> float:
    """A slot holds at least one cache line for every rank of the group."""
    turns = _turns(n, max(m.chunk, LINE * m.size))
    between = replace(m, ranks=1, beside=m.ranks)
    calls = m.calls(KERNEL_CALLS * m.ranks + m.size)  # one copy per block
    each = m.handing_over() + calls + best_reduce_scatter(between, n / m.ranks / turns)
    return turns * each + m.memory((3 + 1 / m.ranks) * n)


# -- all_gather --------------------------------------------------------------------------------------------------------


def all_gather_doubling(m: ModelMachine, n: float) -> float:
    if m.size.bit_count() != 1:
        return math.inf
    return sum(m.exchange(1 << k, n * (1 << k) / m.size) for k in range(_halvings(m.size)))


def all_gather_bruck(m: ModelMachine, n: float) -> float:
    steps = [1 << k for k in range(_doublings(m.size))]
    rotated = m.memory(2 * n)  # into rank order, at the end
    return sum(m.shift(step, min(step, m.size - step) * n / m.size) for step in steps) + rotated


def all_gather_ring(m: ModelMachine, n: float) -> float:
    return (m.size - 1) * m.shift(1, n / m.size) if m.size > 1 else 0.0


best_all_gather = _best(all_gather_doubling, all_gather_bruck, all_gather_ring)


def window_all_gather(m: ModelMachine, n: float) -> float:
    return _turns(n / m.ranks, m.chunk / 2) * (m.handing_over() + m.calls(m.ranks)) + m.memory(2 * n)


def all_gather_rails(m: ModelMachine, n: float) -> float:
    turns = _turns(n / m.ranks, m.chunk)
    between = replace(m, ranks=1, beside=m.ranks)
    each = m.handing_over() + m.calls(m.size) + best_all_gather(between, n / m.ranks / turns)
    return turns * each + m.memory(2 * n)


# -- broadcast ---------------------------------------------------------------------------------------------------------


def _down_the_tree(m: ModelMachine, step: int, nbytes: float) -> float:
    """A step of the tree: ranks 2 ``step`` apart send to the rank ``step`` after them; at most one per node sends outward."""
    if m.nodes > 1 and 2 * step > m.ranks:
        return m.outward(1, nbytes)
    return m.node_latency_s + m.memory(2 * m.copies * nbytes, max(1.0, m.ranks / (2 * step)))


def binomial(m: ModelMachine, n: float) -> float:
    return sum(_down_the_tree(m, 1 << k, n) for k in range(_doublings(m.size)))


def _scatter(m: ModelMachine, n: float) -> float:
    steps = [1 << k for k in range(_doublings(m.size))]
    return sum(_down_the_tree(m, step, min(step, m.size - step) * n / m.size) for step in steps)


def scatter_ring(m: ModelMachine, n: float) -> float:
    return _scatter(m, n) + all_gather_ring(m, n)


def scatter_doubling(m: ModelMachine, n: float) -> float:
    return _scatter(m, n) + all_gather_doubling(m, n)


best_broadcast = _best(binomial, scatter_ring, scatter_doubling)


def window_broadcast(m: ModelMachine, n: float) -> float:
    turns = _turns(n, m.chunk / 2)
    return turns * (m.handing_over() + m.calls(2)) + m.memory(2 * n, 1) + m.memory(2 * n, m.ranks - 1)


def broadcast_rails(m: ModelMachine, n: float) -> float:
    turns = _turns(n, m.chunk / 2)
    between, slice_ = rails(m, n / turns)
    each = 2 * m.handing_over() + m.calls(3) + best_broadcast(between, slice_)
    return turns * each + m.memory(2 * n, 1) + m.memory(2 * n)


# -- all_to_all --------------------------------------------------------------------------------------------------------


def pairwise(m: ModelMachine, n: float) -> float:
    return m.shifts(n / m.size)


def all_to_all_bruck(m: ModelMachine, n: float) -> float:
    p = m.size
    total = m.memory(4 * n)  # rotated at the beginning and at the end
    for k in range(_doublings(p)):
        blocks = (p >> (k + 1) << k) + max(0, (p & ((2 << k) - 1)) - (1 << k))  # numbers below p that have bit k
        total += m.shift(1 << k, blocks * n / p) + m.memory(4 * blocks * n / p)  # packed and unpacked
    return total


def all_at_once(m: ModelMachine, n: float) -> float:
    part, others = n / m.size, m.size - m.ranks
    out = m.outward(m.ranks * others, part) if others else 0.0
    inside = m.inward((m.ranks - 1) * part)
    return m.calls(2 * (m.size - 1)) + max(out, inside)


def window_all_to_all(m: ModelMachine, n: float) -> float:
    turns = _turns(n, m.chunk)
    return (1 + turns) * (m.handing_over() + m.calls(2 * m.ranks)) + m.memory((4 - 2 / m.ranks) * n)
