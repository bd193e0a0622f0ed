"""The algorithms by operation: name, formula, which machines they are for; which is best, and where another one takes over."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mpicoll.bench import model_formulas as formulas
from mpicoll.bench.model_formulas import Machine

ITEM = 4  # bytes; what is dealt out to the ranks has at least so many for each
ROUNDING = 1e-9  # some formulas are equal but for the order of their sums


@dataclass(frozen=True)
class Algorithm:
    """formula: in the symbols of docs/model.md. textbook: the same for one rank a node and g = 0; empty: there is no such case.

    where: the machines that can have it. parted: every rank has a part of it, so that a tensor may be too small.
    """

    name: str
    seconds: Callable[[Machine, float], float]
    formula: str
    textbook: str = ""
    where: Callable[[Machine], bool] = lambda machine: True
    parted: bool = False

    def cost(self, machine: Machine, nbytes: int) -> float:
        """Seconds; infinite where there is no such algorithm."""
        if not self.where(machine) or (self.parted and nbytes < ITEM * machine.size):
            return math.inf
        return self.seconds(machine, nbytes)


def in_a_node(machine: Machine) -> bool:
    return machine.nodes == 1 and machine.ranks > 1


def in_two_levels(machine: Machine) -> bool:
    return machine.nodes > 1 and machine.ranks > 1


def _window(what: str, seconds: Callable[[Machine, float], float], formula: str, parted: bool = False) -> Algorithm:
    return Algorithm(what, seconds, formula, where=in_a_node, parted=parted)


def _levels(what: str, seconds: Callable[[Machine, float], float], formula: str, parted: bool = False) -> Algorithm:
    return Algorithm(what, seconds, formula, where=in_two_levels, parted=parted)


_FLAT = _window("window, flat", formulas.window_flat, "h + 3cR + (R+3) nμ")
_SLICED = _window("window, sliced", formulas.window_sliced, "(1+2T) h + 6cRT + (5−1/R) nμ")

# By operation, the simpler ones first: they win where two cost the same.
OPERATIONS: dict[str, tuple[Algorithm, ...]] = {
    "all_reduce": (
        Algorithm("recursive doubling", formulas.recursive_doubling, "Σ [X(d, n) + γn]", "lg p · (α + nβ + nγ)"),
        Algorithm(
            "Rabenseifner",
            formulas.rabenseifner,
            "Σ [2 X(d, n/2d) + γn/2d]",
            "2 lg p · α + (p−1)/p · n(2β + γ)",
            parted=True,
        ),
        Algorithm("ring", formulas.ring, "(p−1) [2 S(1, n/p) + γn/p]", "2(p−1) α + (p−1)/p · n(2β + γ)", parted=True),
        _FLAT,
        _SLICED,
        _levels("leaders", formulas.all_reduce_leaders, "(1+2T) h + 6cRT + (3−1/R) nμ + 2nμ(1) + A₁(n) + W"),
        _levels("rails", formulas.all_reduce_rails, "window, sliced + 2T Aᵣ(n/2RT)"),
    ),
    "all_reduce_half_precision": (
        Algorithm("as float32", formulas.halves_as_float32, "6nμ + A(2n)"),
        Algorithm(
            "moved",
            formulas.halves_moved,
            "U [all at once (n/U) + 3cp + AG(n/U)] + (1+1/p) nμ, U = ⌈n / 8 MiB⌉",
            parted=True,
        ),
        _FLAT,
        _SLICED,
        _levels("leaders", formulas.halves_leaders, "(1+2T) h + 6cRT + (3−1/R) nμ + 2nμ(1) + A₁(2n) + W"),
        _levels("rails", formulas.halves_rails, "window, sliced + 2T Aᵣ(n/RT)"),
    ),
    "reduce_scatter": (
        Algorithm(
            "recursive halving",
            formulas.recursive_halving,
            "Σ [X(d, nd/q) + γnd/q]",
            "lg p · α + (p−1)/p · n(β + γ)",
            parted=True,
        ),
        Algorithm("ring", formulas.reduce_scatter_ring, "(p−1) [S(1, n/p) + γn/p]", "(p−1) α + (p−1)/p · n(β + γ)", parted=True),
        Algorithm(
            "pairwise",
            formulas.reduce_scatter_pairwise,
            "Σⱼ [S(j, n/p) + γn/p]",
            "(p−1) α + (p−1)/p · n(β + γ)",
            parted=True,
        ),
        _window("window", formulas.window_reduce_scatter, "T (h + 4cR − c) + (3−1/R) nμ", True),
        _levels(
            "leaders",
            formulas.reduce_scatter_leaders,
            "(2+2T) h + 6cRT + (3−1/R) nμ + 2nμ(1) + RS₁(n) + 2n/N μ(1) + 2n/p μ",
            True,
        ),
        _levels("rails", formulas.reduce_scatter_rails, "U [h + c(3R+p) + RSᵣ(n/RU)] + (3+1/R) nμ, U = ⌈n / max(C, 64p)⌉", True),
    ),
    "all_gather": (
        Algorithm(
            "recursive doubling",
            formulas.all_gather_doubling,
            "Σ X(d, nd/p); p a power of two",
            "lg p · α + (p−1)/p · nβ",
            parted=True,
        ),
        Algorithm(
            "Bruck",
            formulas.all_gather_bruck,
            "Σ S(d, min(d, p−d) n/p) + 2nμ",
            "⌈lg p⌉ α + (p−1)/p · nβ + 2nμ",
            parted=True,
        ),
        Algorithm("ring", formulas.all_gather_ring, "(p−1) S(1, n/p)", "(p−1) α + (p−1)/p · nβ", parted=True),
        _window("window", formulas.window_all_gather, "⌈2n/RC⌉ (h + cR) + 2nμ", True),
        _levels("leaders", formulas.all_gather_leaders, "h + 2n/p μ + 2n/N μ(1) + AG₁(n) + W", True),
        _levels("rails", formulas.all_gather_rails, "U [h + cp + AGᵣ(n/RU)] + 2nμ, U = ⌈n/RC⌉", True),
    ),
    "broadcast": (
        Algorithm("binomial", formulas.binomial, "Σ D(d, n)", "⌈lg p⌉ (α + nβ)"),
        Algorithm(
            "scatter + doubling",
            formulas.scatter_doubling,
            "Σ [D(d, nd/p) + X(d, nd/p)]; p a power of two",
            "2 lg p · α + 2 (p−1)/p · nβ",
            parted=True,
        ),
        Algorithm(
            "scatter + ring",
            formulas.scatter_ring,
            "Σ D(d, nd/p) + (p−1) S(1, n/p)",
            "(⌈lg p⌉ + p−1) α + 2 (p−1)/p · nβ",
            parted=True,
        ),
        _window("window", formulas.window_broadcast, "W = ⌈2n/C⌉ (h + 2c) + 2nμ(1) + 2nμ(R−1)"),
        _levels("leaders", formulas.broadcast_leaders, "B₁(n) + W"),
        _levels("rails", formulas.broadcast_rails, "U [2h + 3c + Bᵣ(n/RU)] + 2nμ(1) + 2nμ, U = ⌈2n/C⌉"),
    ),
    "all_to_all": (
        Algorithm("pairwise", formulas.pairwise, "Σⱼ S(j, n/p)", "(p−1) α + (p−1)/p · nβ", parted=True),
        Algorithm(
            "Bruck",
            formulas.all_to_all_bruck,
            "Σ [S(d, b) + 4bμ] + 4nμ; b = n/p · numbers below p that have bit d",
            "lg p · (α + n/2 · β + 2nμ) + 4nμ",
            parted=True,
        ),
        Algorithm(
            "all at once",
            formulas.all_at_once,
            "2c(p−1) + max(M(R(p−R), n/p), L((R−1) n/p))",
            "2c(p−1) + α + (p−1)/p · nβ",
            parted=True,
        ),
        _window("window", formulas.window_all_to_all, "(1+T) (h + 2cR) + (4−2/R) nμ", True),
    ),
}


def best(operation: str, machine: Machine, nbytes: int) -> Algorithm | None:
    """The one that costs least; None: there are fewer elements than ranks."""
    costs = [(algorithm.cost(machine, nbytes), algorithm) for algorithm in OPERATIONS[operation]]
    least = min(cost for cost, _ in costs)
    return next(algorithm for cost, algorithm in costs if cost <= least * (1 + ROUNDING)) if least < math.inf else None


@dataclass(frozen=True)
class TakeOver:
    """From ``nbytes`` on the algorithm is the best; the one before it was so below. after: None at the least size."""

    nbytes: int
    name: str
    after: str | None = None


def take_overs(operation: str, machine: Machine, sizes: Sequence[int]) -> list[TakeOver]:
    """Who is best, from the least of ``sizes`` to the largest, to the byte.

    Between two of ``sizes`` it looks at two more sizes an octave: what is best for a shorter while may be missed.
    """
    found: list[TakeOver] = []
    last = min(sizes)
    for nbytes in _grid(sizes, ITEM * machine.size):
        while True:
            name = _best_name(operation, machine, nbytes)
            before = found[-1].name if found else None
            if name is None or name == before:
                break
            first = nbytes if before is None else _first(operation, machine, before, last, nbytes)
            found.append(TakeOver(first, _best_name(operation, machine, first) or name, before))
            last = first
        last = nbytes
    return found


def _best_name(operation: str, machine: Machine, nbytes: int) -> str | None:
    found = best(operation, machine, nbytes)
    return found.name if found is not None else None


def _grid(sizes: Sequence[int], least: int) -> Iterator[int]:
    low, high = min(sizes), max(sizes)
    between = [step << k for k in range(high.bit_length()) for step in (2, 3)]
    yield from sorted({*sizes, *(nbytes for nbytes in (*between, least) if low < nbytes < high)})


def _first(operation: str, machine: Machine, name: str, low: int, high: int) -> int:
    """The least size above ``low``, where ``name`` is best, at which it is not; at ``high`` it is not."""
    while high - low > 1:
        middle = (low + high) // 2
        if _best_name(operation, machine, middle) == name:
            low = middle
        else:
            high = middle
    return high
