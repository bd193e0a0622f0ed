"""Which MPI calls and algorithms a group's collectives use, in order: for tests that compare ranks or groups."""

from collections.abc import Callable
from typing import Any

import pytest

from mpicoll._algorithms import direct, hierarchical, pairwise, shared_memory
from mpicoll._engine.communicator import Communicator

CALLS = (
    "Allreduce", "Bcast", "Reduce", "Allgather", "Allgatherv", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan",
    "barrier",
)  # fmt: skip
ALGORITHMS = {
    "direct": (direct, ("all_reduce", "reduce_scatter", "all_gather", "broadcast")),
    "hierarchical": (hierarchical, ("all_reduce", "reduce_scatter", "all_gather", "broadcast")),
    "pairwise": (pairwise, ("exchange",)),
    "shared_memory": (
        shared_memory,
        ("all_reduce", "reduce_flat", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier"),
    ),
}


def recorded(group: Communicator, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on, the name of every MPI call and algorithm of ``group`` is added to the list that is returned."""
    record: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            record.append(name)
            return function(*arguments, **more)

        return call

    for name in CALLS:
        monkeypatch.setattr(group.channel, name, watched(name, getattr(group.channel, name)))
    for room, (module, names) in ALGORITHMS.items():
        for name in names:
            monkeypatch.setattr(module, name, watched(f"{room}.{name}", getattr(module, name)))
    return record
