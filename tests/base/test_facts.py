"""Calls of collectives as plain values: their words, their comparison, and their way through JSON."""

import json

import pytest

from mpicoll._base.facts import Facts, difference

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
        "all_reduce(SUM, float32, 8 bytes)",
        "broadcast(int64, 16 bytes, root 1, on xpu)",
        "all_gather(int8, 6 bytes, blocks of [2, 4] bytes)",
        "gather(int8, root 0, to rank 0: 4 bytes)",
        "all_gather_coalesced((int8, 6 bytes, blocks of [2, 4] bytes), (int16, 4 bytes))",
        "scatter, refused: ValueError: too many",
    ]


def test_difference_names_the_ranks_of_each_call() -> None:
    same = Facts("all_reduce", "SUM", "float32", 8)
    assert difference({0: same, 1: same, 2: same}) == ""
    wrong = difference({0: same, 2: same._replace(reduction="MAX"), 3: same})
    assert wrong == "ranks 0, 3: all_reduce(SUM, float32, 8 bytes); rank 2: all_reduce(MAX, float32, 8 bytes)"


def test_sizes_that_only_two_ranks_know_are_compared_between_them() -> None:
    root = Facts("gather", dtype="int8", root=0, sends={}, receives={1: 4, 2: 8})
    one, two = (Facts("gather", dtype="int8", root=0, sends={0: 4}, receives={}) for _ in range(2))
    assert difference({0: root, 1: one}) == ""
    assert "rank 0: gather(int8, root 0, from rank 1: 4 bytes, from rank 2: 8 bytes)" in difference({0: root, 1: one, 2: two})
