"""The algorithms of each operation: name, formula, machines; which one is best, and from which size another one is."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mpicoll.bench.model import costs
from mpicoll.bench.model.costs import Cost, ModelMachine

ITEM = 4  # bytes of an element; every rank gets at least one where a tensor is split among the ranks
ROUNDING = 1e-9  # some formulas differ only in the order of their sums


@dataclass(frozen=True)
class Algorithm:
    """An algorithm and its cost.

    Args:
        seconds: The cost on a machine, for a number of bytes.
        formula: The same in the symbols of docs/model.md.
        textbook: The formula for one rank per node and g = 0; empty: the algorithm needs several ranks per node.
        where: Whether a machine can run it.
        parted: The tensor is split among the ranks, so a small one may have fewer elements than ranks.
    """

    name: str
    seconds: Cost
    formula: str
    textbook: str = ""
    where: Callable[[ModelMachine], bool] = lambda machine: True
    parted: bool = False

    def cost(self, machine: ModelMachine, nbytes: int) -> float:
        """Seconds; infinite where the algorithm cannot run."""
        if not self.where(machine) or (self.parted and nbytes < ITEM * machine.size):
            return math.inf
        return self.seconds(machine, nbytes)


def in_a_node(machine: ModelMachine) -> bool:
    return machine.nodes == 1 and machine.ranks > 1


def has_two_levels(machine: ModelMachine) -> bool:
    return machine.nodes > 1 and machine.ranks > 1


def _parted(name: str, seconds: Cost, formula: str, textbook: str = "") -> Algorithm:
    return Algorithm(name, seconds, formula, textbook, parted=True)


def _window(name: str, seconds: Cost, formula: str, parted: bool = False) -> Algorithm:
    return Algorithm(name, seconds, formula, where=in_a_node, parted=parted)


def _rails(seconds: Cost, formula: str, parted: bool = False) -> Algorithm:
    return Algorithm("rails", seconds, formula, where=has_two_levels, parted=parted)


_FLAT = _window("window, flat", costs.window_flat, "h + 3cR + (R+3) nμ")
_SLICED = _window("window, sliced", costs.window_sliced, "(1+2T) h + 6cRT + (5−1/R) nμ")

# The simpler ones first: they win where two cost the same.
OPERATIONS: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": (
        Algorithm("recursive doubling", costs.recursive_doubling, "Σ [X(d, n) + γn]", "lg p · (α + nβ + nγ)"),
        _parted("Rabenseifner", costs.rabenseifner, "Σ [2 X(d, n/2d) + γn/2d]", "2 lg p · α + (p−1)/p · n(2β + γ)"),
        _parted("ring", costs.ring, "(p−1) [2 S(1, n/p) + γn/p]", "2(p−1) α + (p−1)/p · n(2β + γ)"),
        _FLAT,
        _SLICED,
        _rails(costs.all_reduce_rails, "window, sliced + 2T Aᵣ(n/2RT)"),
    ),
    "all_reduce_half_precision": (
        Algorithm("as float32", costs.halves_as_float32, "6nμ + A(2n)"),
        _parted("direct", costs.halves_direct, "U [all at once (n/U) + 3cp + AG(n/U)] + (1+1/p) nμ, U = ⌈n / 8 MiB⌉"),
        _FLAT,
        _SLICED,
        _rails(costs.halves_rails, "window, sliced + 2T Aᵣ(n/RT)"),
    ),
    "reduce_scatter": (
        _parted("recursive halving", costs.recursive_halving, "Σ [X(d, nd/q) + γnd/q]", "lg p · α + (p−1)/p · n(β + γ)"),
        _parted("ring", costs.reduce_scatter_ring, "(p−1) [S(1, n/p) + γn/p]", "(p−1) α + (p−1)/p · n(β + γ)"),
        _parted("pairwise", costs.reduce_scatter_pairwise, "Σⱼ [S(j, n/p) + γn/p]", "(p−1) α + (p−1)/p · n(β + γ)"),
        _window("window", costs.window_reduce_scatter, "T (h + 4cR − c) + (3−1/R) nμ", True),
        _rails(costs.reduce_scatter_rails, "U [h + c(3R+p) + RSᵣ(n/RU)] + (3+1/R) nμ, U = ⌈n / max(C, 64p)⌉", True),
    ),
    "all_gather": (
        _parted("recursive doubling", costs.all_gather_doubling, "Σ X(d, nd/p); p a power of two", "lg p · α + (p−1)/p · nβ"),
        _parted("Bruck", costs.all_gather_bruck, "Σ S(d, min(d, p−d) n/p) + 2nμ", "⌈lg p⌉ α + (p−1)/p · nβ + 2nμ"),
        _parted("ring", costs.all_gather_ring, "(p−1) S(1, n/p)", "(p−1) α + (p−1)/p · nβ"),
        _window("window", costs.window_all_gather, "⌈2n/RC⌉ (h + cR) + 2nμ", True),
        _rails(costs.all_gather_rails, "U [h + cp + AGᵣ(n/RU)] + 2nμ, U = ⌈n/RC⌉", True),
    ),
    "broadcast": (
        Algorithm("binomial", costs.binomial, "Σ D(d, n)", "⌈lg p⌉ (α + nβ)"),
        _parted(
            "scatter + doubling",
            costs.scatter_doubling,
            "Σ [D(d, nd/p) + X(d, nd/p)]; p a power of two",
            "2 lg p · α + 2 (p−1)/p · nβ",
        ),
        _parted("scatter + ring", costs.scatter_ring, "Σ D(d, nd/p) + (p−1) S(1, n/p)", "(⌈lg p⌉ + p−1) α + 2 (p−1)/p · nβ"),
        _window("window", costs.window_broadcast, "W = ⌈2n/C⌉ (h + 2c) + 2nμ(1) + 2nμ(R−1)"),
        _rails(costs.broadcast_rails, "U [2h + 3c + Bᵣ(n/RU)] + 2nμ(1) + 2nμ, U = ⌈2n/C⌉"),
    ),
    "all_to_all": (
        _parted("pairwise", costs.pairwise, "Σⱼ S(j, n/p)", "(p−1) α + (p−1)/p · nβ"),
        _parted(
            "Bruck",
            costs.all_to_all_bruck,
            "Σ [S(d, b) + 4bμ] + 4nμ; b = n/p · numbers below p that have bit d",
            "lg p · (α + n/2 · β + 2nμ) + 4nμ",
        ),
        Algorithm(
            "all at once",
            costs.all_at_once,
            "2c(p−1) + max(M(R(p−R), n/p), L((R−1) n/p))",
            "2c(p−1) + α + (p−1)/p · nβ",
            parted=True,
        ),
        _window("window", costs.window_all_to_all, "(1+T) (h + 2cR) + (4−2/R) nμ", True),
    ),
}


def best(operation: str, machine: ModelMachine, nbytes: int) -> Algorithm | None:
    """The algorithm that costs least; None: there are fewer elements than ranks."""
    costs = [(algorithm.cost(machine, nbytes), algorithm) for algorithm in OPERATIONS[operation]]
    least = min(cost for cost, _ in costs)
    return next(algorithm for cost, algorithm in costs if cost <= least * (1 + ROUNDING)) if least < math.inf else None


@dataclass(frozen=True)
class TakeOver:
    """From ``nbytes`` on algorithm ``name`` is the best, and below it algorithm ``after``; None at the smallest size."""

    nbytes: int
    name: str
    after: str | None = None


def take_overs(operation: str, machine: ModelMachine, sizes: Sequence[int]) -> list[TakeOver]:
    """The best algorithms from the smallest of ``sizes`` to the largest, with the first byte of each.

    It tries ``sizes`` and two sizes per power of two between them, so it may miss an algorithm that is best for a short range.
    """
    ranges: list[TakeOver] = []
    last = min(sizes)
    for nbytes in _grid(sizes, ITEM * machine.size):
        while True:
            name = _best_name(operation, machine, nbytes)
            before = ranges[-1].name if ranges else None
            if name is None or name == before:
                break
            first = nbytes if before is None else _first(operation, machine, before, last, nbytes)
            ranges.append(TakeOver(first, _best_name(operation, machine, first) or name, before))
            last = first
        last = nbytes
    return ranges


def _best_name(operation: str, machine: ModelMachine, nbytes: int) -> str | None:
    algorithm = best(operation, machine, nbytes)
    return algorithm.name if algorithm is not None else None


def _grid(sizes: Sequence[int], least: int) -> Iterator[int]:
    low, high = min(sizes), max(sizes)
    between = [step << k for k in range(high.bit_length()) for step in (2, 3)]
    yield from sorted({*sizes, *(nbytes for nbytes in (*between, least) if low < nbytes < high)})


def _first(operation: str, machine: ModelMachine, name: str, low: int, high: int) -> int:
    """The smallest size at which ``name`` is not the best. It is the best at ``low`` and not at ``high``."""
    sizes = range(low + 1, high)
    return low + 1 + bisect_left(sizes, True, key=lambda nbytes: _best_name(operation, machine, nbytes) != name)
