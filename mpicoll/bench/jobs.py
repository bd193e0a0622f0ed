"""Processes and jobs of their own, started by rank 0 while the other ranks sleep."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from mpicoll._discovery import detect
from mpicoll._discovery.ask import run

if TYPE_CHECKING:  # importing it starts MPI, whose start such a job may want to measure
    from mpicoll.bench.control import ControlChannel

LIMIT_S = 120.0
Value = TypeVar("Value")


NEVER_BEGAN = "The PMIx server's listener thread failed to start"  # Open MPI's launcher (5.0.11), once in some hundred times


class ChildFailed(Exception):
    """A child did not do what it was started for; says what it said. ``words``: all of it."""

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


class OnRank0(Generic[Value]):
    """The outcome of what rank 0 alone did: a value, or why there is none; on every rank."""

    def __init__(self, control: ControlChannel, act: Callable[[], Value]) -> None:
        outcome: tuple[Value | None, str | None] = (None, None)
        if control.rank == 0:
            try:
                outcome = (act(), None)
            except (ChildFailed, OSError) as error:
                outcome = (None, str(error))
        self.value, self.reason = control.first(outcome)


def python(*words: str, env: Mapping[str, str] | None = None) -> str:
    """What a Python outside this job prints. Raises ChildFailed."""
    environ = {**detect.without_job(os.environ), **(env or {})}
    for name in detect.TORCH_VARIABLES:
        environ.pop(name, None)
    ended = run([sys.executable, *words], environ, LIMIT_S)
    if ended.status is None:
        raise ChildFailed(f"no end after {LIMIT_S:g} s: python {' '.join(words)}")
    if ended.status != 0:
        raise ChildFailed(f"exit status {ended.status}: python {' '.join(words)}: {ended.last_words()}", ended.errors)
    return ended.output


def job(ranks: int, *words: str) -> str:
    """What a job of so many ranks on this host prints. Raises ChildFailed."""
    command = ("-m", "mpicoll.run", "--quiet", "-n", str(ranks), *words)
    try:
        return python(*command)
    except ChildFailed as failed:
        if NEVER_BEGAN not in failed.words:
            raise
    return python(*command)
