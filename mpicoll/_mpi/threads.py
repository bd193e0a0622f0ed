"""Functions that our background threads call before they call MPI."""

from __future__ import annotations

from collections.abc import Callable

_preparations: list[Callable[[], None]] = []  # each added once, by the room that needs it


def prepare_with(preparation: Callable[[], None]) -> None:
    """Makes our background threads call ``preparation`` before each operation. Adding it again does nothing."""
    if preparation not in _preparations:
        _preparations.append(preparation)


def entering() -> None:
    """Runs the preparations. A background thread calls this before it calls MPI."""
    for preparation in _preparations:
        preparation()
