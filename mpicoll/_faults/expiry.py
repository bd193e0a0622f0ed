"""What this process does when an operation has taken longer than its timeout, before the error or the end of the job."""

from __future__ import annotations

from collections.abc import Callable

_actions: list[Callable[[str, bool], None]] = []  # each added once, by the file that needs it


def call_on_expiry(action: Callable[[str, bool], None]) -> None:
    """Makes `expired` call ``action`` with its arguments. Adding it again does nothing. It must not raise."""
    if action not in _actions:
        _actions.append(action)


def expired(reason: str, ends_job: bool) -> None:
    """Calls the actions. ``ends_job``: the job is aborted afterwards; otherwise an error is raised."""
    for action in _actions:
        action(reason, ends_job)
