"""What our background threads do before they call MPI."""

from __future__ import annotations

from collections.abc import Callable

_preparations: list[Callable[[], None]] = []  # added once, by the room that needs it


def prepare_with(preparation: Callable[[], None]) -> None:
    """Has our threads call ``preparation`` before each operation. Adding it again does nothing."""
    if preparation not in _preparations:
        _preparations.append(preparation)


def entering() -> None:
    """Called by a background thread before it asks MPI."""
    for preparation in _preparations:
        preparation()
