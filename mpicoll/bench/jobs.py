"""Processes and jobs of their own, started by rank 0 while the other ranks sleep."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from mpicoll import launchers

if TYPE_CHECKING:  # importing it starts MPI, whose start such a job may want to measure
    from mpicoll.mpi.referee import Referee

LIMIT_S = 120.0
Value = TypeVar("Value")


class ChildFailed(Exception):
    """A child did not do what it was started for; says what it said."""


class OnRank0(Generic[Value]):
    """The outcome of what rank 0 alone did: a value, or why there is none; on every rank."""

    def __init__(self, referee: Referee, act: Callable[[], Value]) -> None:
        outcome: tuple[Value | None, str | None] = (None, None)
        if referee.rank == 0:
            try:
                outcome = (act(), None)
            except (ChildFailed, OSError) as error:
                outcome = (None, str(error))
        self.value, self.reason = referee.first(outcome)


def python(*words: str, env: Mapping[str, str] | None = None) -> str:
    """What a Python outside this job prints. Raises ChildFailed."""
    environ = {**launchers.without_job(os.environ), **(env or {})}
    for name in launchers.TORCH_VARIABLES:
        environ.pop(name, None)
    try:
        done = subprocess.run(
            [sys.executable, *words], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise ChildFailed(f"no end after {LIMIT_S:g} s: python {' '.join(words)}") from None
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "nothing").split("\n")[-1]
        raise ChildFailed(f"exit status {done.returncode}: python {' '.join(words)}: {last}")
    return done.stdout


def job(ranks: int, *words: str) -> str:
    """What a job of so many ranks on this host prints. Raises ChildFailed."""
    return python("-m", "mpicoll.run", "--quiet", "-n", str(ranks), *words)
