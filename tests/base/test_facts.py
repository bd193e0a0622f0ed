"""Calls of collectives as plain values: their words, their comparison, and their way through JSON."""

import json
from typing import Any

import pytest

from mpicoll._base.facts import Facts, difference, mismatch

CALLS = [
    Facts("barrier"),
    Facts("all_reduce", "SUM", "float32", 8),
    Facts("broadcast", dtype="int64", nbytes=16, root=1, device="xpu"),
    Facts("all_gather", dtype="int8", nbytes=6, sizes=(2, 4)),
    Facts("gather", dtype="int8", root=0, sends={0: 4}, receives={}),
    Facts("all_gather_coalesced", parts=(Facts("", dtype="int8", nbytes=6, sizes=(2, 4)), Facts("", dtype="int16", nbytes=4))),
    Facts("scatter", refusal="ValueError: too many"),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.operation)
def test_json_keeps_a_call(call: Facts) -> None:
    text = json.dumps({"number": 7, **call.as_json()})
    assert Facts.from_json(json.loads(text)) == call


def test_the_words_of_a_call() -> None:
    assert [str(call) for call in CALLS] == [
        "barrier()",
        "all_reduce(SUM, float32, 2 elements)",
        "broadcast(int64, 2 elements, root 1, on xpu)",
        "all_gather(int8, 6 elements, blocks of [2, 4] elements)",
        "gather(int8, root 0, to rank 0: 4 elements)",
        "all_gather_coalesced((int8, 6 elements, blocks of [2, 4] elements), (int16, 2 elements))",
        "scatter, refused: ValueError: too many",
    ]


def test_difference_names_the_ranks_of_each_call() -> None:
    same = Facts("all_reduce", "SUM", "float32", 8)
    assert difference({0: same, 1: same, 2: same}) == ""
    wrong = difference({0: same, 2: same._replace(reduction="MAX"), 3: same})
    assert wrong == (
        "the ranks' calls of all_reduce differ in the reduction. Ranks 0, 3: all_reduce(SUM, float32, 2 elements); "
        "rank 2: all_reduce(MAX, float32, 2 elements). All ranks must agree on the reduction"
    )


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"dtype": "int32"}, "the dtype"),
        ({"dtype": "float64", "nbytes": 16, "sizes": (16, 32)}, "the dtype"),
        ({"nbytes": 12}, "the number of elements"),
        ({"root": 1}, "the root"),
        ({"sizes": (8, 24)}, "the sizes of the blocks"),
        ({"device": "cuda"}, "the kind of device"),
        ({"reduction": "PRODUCT"}, "the reduction"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_words_say_what_differs(changed: dict[str, Any], what: str) -> None:
    """Of a coalesced operation, too, in one of its tensors."""
    call = Facts("reduce", "SUM", "float32", 8, root=0, sizes=(8, 16))
    whole, other = Facts("reduce", parts=(Facts("", "SUM", "float32", 8), call._replace(operation=""))), call._replace(**changed)
    parts = (whole.parts[0], other._replace(operation=""))
    for calls in {0: call, 1: other}, {0: whole, 1: whole._replace(parts=parts)}:
        assert mismatch(calls).startswith(f"the ranks' calls of reduce differ in {what}. Rank 0: ")
        assert mismatch(calls).endswith(f"All ranks must agree on {what}")


def test_of_many_sizes_the_words_have_the_first_ones() -> None:
    """And a checksum: calls that differ have other words."""
    sizes = (*range(4, 44, 4), *[4] * 30)
    call, other = (Facts("all_gather", dtype="int32", sizes=each) for each in (sizes, (*sizes[:-1], 8)))
    first = "all_gather(int32, blocks of [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 1, 1, 1, 1, 1, ...] (40, checksum "
    assert str(call).startswith(first)
    assert str(other).startswith(first)
    assert str(call) != str(other)
    assert "differ in the sizes of the blocks" in mismatch({0: call, 1: other})


def test_the_words_for_other_collectives_and_for_a_refusal() -> None:
    calls = {0: Facts("barrier"), 1: Facts("all_reduce", "SUM", "float32", 8)}
    said = "the ranks call different collectives. Rank 0: barrier(); rank 1: all_reduce(SUM, float32, 2 elements). "
    assert mismatch(calls) == said + "All ranks must call the same collectives in the same order"
    calls[1] = Facts("barrier", refusal="ValueError: no")
    assert mismatch(calls) == "rank 1 refused the arguments. Rank 0: barrier(); rank 1: barrier, refused: ValueError: no"


def test_sizes_that_only_two_ranks_know_are_compared_between_them() -> None:
    root = Facts("gather", dtype="int8", root=0, sends={}, receives={1: 4, 2: 8})
    one, two = (Facts("gather", dtype="int8", root=0, sends={0: 4}, receives={}) for _ in range(2))
    assert difference({0: root, 1: one}) == ""
    assert "Rank 0: gather(int8, root 0, from rank 1: 4 elements, from rank 2: 8 elements)" in difference(
        {0: root, 1: one, 2: two}
    )
