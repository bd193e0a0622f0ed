"""Which algorithm each operation takes, without MPI: at the sizes around each threshold, on one node and on several."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpicoll._host import thresholds
from mpicoll._host.thresholds import (
    DIRECT,
    HIERARCHICAL,
    LARGEST_DISPLACEMENT,
    NATIVE,
    NEVER,
    PAIRWISE,
    SHARED_MEMORY,
    WINDOW_FROM,
    Choices,
    Thresholds,
)

FROM = {name: {2: 1000 * (number + 1)} for number, name in enumerate(WINDOW_FROM)}
CHOICES = Choices(window_from=FROM, between_from=FROM, apart_from={**FROM, "halves": {2: 100}})
ONE_NODE, TWO_NODES = thresholds.of_group(CHOICES, (4,)), thresholds.of_group(CHOICES, (2, 2))
UNEVEN, APART = thresholds.of_group(CHOICES, (2, 1)), thresholds.of_group(CHOICES, (1, 1, 1, 1))
ALONE, NO_WINDOWS = thresholds.of_group(CHOICES, (1,)), thresholds.of_group(CHOICES, (4,), possible=False)

Choose = Callable[[Thresholds, int], str]
# name in the table, choice by bytes
SIZED: dict[str, tuple[str, Choose]] = {
    "all_reduce": ("all_reduce", thresholds.all_reduce),
    "all_reduce of halves": ("halves", lambda known, n: thresholds.all_reduce(known, n, widened=True)),
    "reduce": ("reduce", thresholds.reduce),
    "reduce_scatter": ("reduce_scatter", thresholds.reduce_scatter),
    "broadcast": ("broadcast", thresholds.broadcast),
    "all_gather": ("all_gather", lambda known, n: thresholds.all_gather(known, [n // 4] * 4)),
}


@pytest.mark.parametrize("operation", SIZED)
def test_windows_take_over_at_the_threshold(operation: str) -> None:
    name, choose = SIZED[operation]
    at = FROM[name][2]
    below = DIRECT if name == "halves" and at - 4 >= ONE_NODE.direct_from else NATIVE
    assert (choose(ONE_NODE, at - 4), choose(ONE_NODE, at)) == (below, SHARED_MEMORY)
    assert (choose(TWO_NODES, at - 4), choose(TWO_NODES, at)) == (below, HIERARCHICAL)


@pytest.mark.parametrize("operation", SIZED)
def test_ranks_on_nodes_of_their_own_swap_slices_from_the_threshold_on(operation: str) -> None:
    name, choose = SIZED[operation]
    at = CHOICES.apart_from[name][2] * 4
    assert (choose(APART, at - 4), choose(APART, at)) == (NATIVE, DIRECT)
    without_threads = thresholds.of_group(CHOICES, (1,) * 4, possible=False)  # no window is needed
    assert choose(without_threads, at) == DIRECT


@pytest.mark.parametrize("operation", SIZED)
@pytest.mark.parametrize("known", [NO_WINDOWS, ONE_NODE.without_windows()], ids=["no windows", "given up"])
def test_without_windows(operation: str, known: Thresholds) -> None:
    name, choose = SIZED[operation]
    assert choose(known, 4) == NATIVE
    assert choose(known, 1 << 40) == (DIRECT if name == "halves" else NATIVE)


@pytest.mark.parametrize("operation", SIZED)
def test_a_group_of_one_rank(operation: str) -> None:
    assert SIZED[operation][1](ALONE, 1 << 40) == NATIVE


def test_what_torch_has_no_kernel_for_is_reduced_by_mpi() -> None:
    for choose in (thresholds.all_reduce, thresholds.reduce, thresholds.reduce_scatter):
        assert choose(ONE_NODE, 1 << 40, has_kernel=False) == NATIVE  # type: ignore[operator]


def test_half_precision_is_reduced_directly_where_there_is_no_window() -> None:
    at = NO_WINDOWS.direct_from
    assert at == 100 * 4
    for choose in (thresholds.all_reduce, thresholds.reduce_scatter):
        assert choose(NO_WINDOWS, at, widened=True) == DIRECT  # type: ignore[operator]
        assert choose(NO_WINDOWS, at - 1, widened=True) == NATIVE  # type: ignore[operator]
        assert choose(NO_WINDOWS, at, widened=False) == NATIVE  # type: ignore[operator]


def test_blocks_of_different_sizes() -> None:
    assert thresholds.reduce_scatter(ONE_NODE, 1 << 40, even=False) == NATIVE
    assert thresholds.all_gather(ONE_NODE, [1 << 20, 4]) == SHARED_MEMORY
    assert thresholds.all_gather(APART, [1 << 20, 4, 0, 4]) == DIRECT
    assert thresholds.reduce_scatter(APART, 1 << 40, even=False) == NATIVE
    assert thresholds.all_gather(TWO_NODES, [1 << 20, 4, 4, 4]) == NATIVE
    assert thresholds.all_gather(NO_WINDOWS, [1, LARGEST_DISPLACEMENT]) == PAIRWISE
    assert thresholds.all_gather(NO_WINDOWS, [0, LARGEST_DISPLACEMENT]) == NATIVE


def test_uneven_nodes_keep_what_needs_no_equal_blocks() -> None:
    assert thresholds.broadcast(UNEVEN, 1 << 40) == HIERARCHICAL
    assert thresholds.reduce_scatter(UNEVEN, 1 << 40) == NATIVE
    assert (UNEVEN.least["reduce_scatter"], UNEVEN.least["all_gather"]) == (NEVER, NEVER)
    assert thresholds.all_gather(UNEVEN, [1 << 30] * 3) == NATIVE


@pytest.mark.parametrize(
    ("known", "algorithm"),
    [(ONE_NODE, SHARED_MEMORY), (TWO_NODES, PAIRWISE), (APART, PAIRWISE), (ALONE, PAIRWISE), (NO_WINDOWS, PAIRWISE)],
    ids=["one node", "two nodes", "apart", "alone", "no windows"],
)
def test_all_to_all(known: Thresholds, algorithm: str) -> None:
    """Whatever the sizes, which only pairs of ranks know."""
    assert thresholds.all_to_all(known) == algorithm


@pytest.mark.parametrize("known", [ONE_NODE, TWO_NODES, APART, ALONE, NO_WINDOWS])
def test_below_the_least_size_everything_is_native(known: Thresholds) -> None:
    """The backend makes one MPI call there and asks no function."""
    below = known.single_call_below()
    for name, choose in SIZED.values():
        size = min(below[name], 1 << 40) - 4
        assert choose(known, size // 4 * 4) == NATIVE
