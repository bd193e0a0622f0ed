"""Which algorithm each operation takes, without MPI: at the sizes around each threshold, on one node and on several."""

from collections.abc import Callable

import pytest

from mpicoll._host import algorithm_choice as choice
from mpicoll._host.algorithm_choice import (
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
)  # fmt: skip

FROM = {name: {2: 1000 * (number + 1)} for number, name in enumerate(WINDOW_FROM)}
CHOICES = Choices(window_from=FROM, between_from=FROM, apart_from={**FROM, "halves": {2: 100}})
ONE_NODE, TWO_NODES = choice.of_group(CHOICES, (4,)), choice.of_group(CHOICES, (2, 2))
UNEVEN, APART = choice.of_group(CHOICES, (2, 1)), choice.of_group(CHOICES, (1, 1, 1, 1))
ALONE, NO_WINDOWS = choice.of_group(CHOICES, (1,)), choice.of_group(CHOICES, (4,), possible=False)
KNOWN = [ONE_NODE, TWO_NODES, APART, ALONE, NO_WINDOWS]

Choose = Callable[[Thresholds, int], str]
# name in the table, choice by bytes
SIZED: dict[str, tuple[str, Choose]] = {
    "all_reduce": ("all_reduce", choice.all_reduce),
    "all_reduce of halves": ("halves", lambda known, n: choice.all_reduce(known, n, widened=True)),
    "reduce": ("reduce", choice.reduce),
    "reduce_scatter": ("reduce_scatter", choice.reduce_scatter),
    "broadcast": ("broadcast", choice.broadcast),
    "all_gather": ("all_gather", lambda known, n: choice.all_gather(known, [n // 4] * 4)),
}


HUGE = 1 << 40


@pytest.mark.parametrize("operation", SIZED)
def test_around_each_threshold(operation: str) -> None:
    name, choose = SIZED[operation]
    at, apart = FROM[name][2], CHOICES.apart_from[name][2] * 4
    halves = name == "halves"
    below = DIRECT if halves and at - 4 >= ONE_NODE.direct_from else NATIVE
    for case, known, expected in (
        ("one node", ONE_NODE, {at - 4: below, at: SHARED_MEMORY}),
        ("several nodes", TWO_NODES, {at - 4: below, at: HIERARCHICAL}),
        ("a node for each rank", APART, {apart - 4: NATIVE, apart: DIRECT}),
        (
            "a node for each rank, without windows",
            choice.of_group(CHOICES, (1,) * 4, possible=False),
            {apart: DIRECT},
        ),
        ("no windows", NO_WINDOWS, {4: NATIVE, HUGE: DIRECT if halves else NATIVE}),
        ("windows given up", ONE_NODE.without_windows(), {4: NATIVE, HUGE: DIRECT if halves else NATIVE}),
        ("one rank", ALONE, {HUGE: NATIVE}),
    ):
        assert {nbytes: choose(known, nbytes) for nbytes in expected} == expected, case


def test_what_else_decides() -> None:
    reductions, at = (
        (choice.all_reduce, choice.reduce, choice.reduce_scatter),
        NO_WINDOWS.direct_from,
    )
    assert at == 100 * 4
    for case, found, expected in (
        ("no kernel of torch", {choose(ONE_NODE, HUGE, has_kernel=False) for choose in reductions}, {NATIVE}),
        *[
            (f"halves without windows: {choose.__name__}",
             [choose(NO_WINDOWS, at, widened=True), choose(NO_WINDOWS, at - 1, widened=True), choose(NO_WINDOWS, at)],
             [DIRECT, NATIVE, NATIVE])
            for choose in (choice.all_reduce, choice.reduce_scatter)
        ],
        ("uneven blocks to reduce", [choice.reduce_scatter(of, HUGE, even=False) for of in (ONE_NODE, APART)], [NATIVE] * 2),
        ("uneven blocks, one node", choice.all_gather(ONE_NODE, [1 << 20, 4]), SHARED_MEMORY),
        ("uneven blocks, apart", choice.all_gather(APART, [1 << 20, 4, 0, 4]), DIRECT),
        ("uneven blocks, several nodes", choice.all_gather(TWO_NODES, [1 << 20, 4, 4, 4]), NATIVE),
        ("more than MPI can displace", choice.all_gather(NO_WINDOWS, [1, LARGEST_DISPLACEMENT]), PAIRWISE),
        ("all that MPI can displace", choice.all_gather(NO_WINDOWS, [0, LARGEST_DISPLACEMENT]), NATIVE),
        ("uneven nodes, no blocks", choice.broadcast(UNEVEN, HUGE), HIERARCHICAL),
        ("uneven nodes", {choice.reduce_scatter(UNEVEN, HUGE), choice.all_gather(UNEVEN, [1 << 30] * 3)}, {NATIVE}),
        ("uneven nodes, least", {UNEVEN.least["reduce_scatter"], UNEVEN.least["all_gather"]}, {NEVER}),
        ("all_to_all: only pairs know sizes", [choice.all_to_all(of) for of in KNOWN], [SHARED_MEMORY] + [PAIRWISE] * 4),
    ):  # fmt: skip
        assert found == expected, case


@pytest.mark.parametrize("known", KNOWN)
def test_below_the_least_size_everything_is_native(known: Thresholds) -> None:
    """The backend makes one MPI call there and asks no function."""
    below = known.single_call_below()
    for name, choose in SIZED.values():
        size = min(below[name], HUGE) - 4
        assert choose(known, size // 4 * 4) == NATIVE
