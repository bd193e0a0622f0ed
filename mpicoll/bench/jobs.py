"""Separate processes and jobs, which rank 0 starts while the other ranks sleep."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from mpicoll._discovery import detect
from mpicoll._discovery.ask import run

if TYPE_CHECKING:  # importing it starts MPI, and a job may measure that start
    from mpicoll.bench.control import ControlChannel

LIMIT_S = 120.0
Value = TypeVar("Value")


NEVER_BEGAN = "The PMIx server's listener thread failed to start"  # Open MPI 5.0.11, once in some hundred jobs


class ChildFailed(Exception):
    """A child process failed. words: its standard error."""

    def __init__(self, message: str, words: str = "") -> None:
        super().__init__(message)
        self.words = words


class OnRank0(Generic[Value]):
    """The result of a function that only rank 0 calls, on every rank: a value, or the reason why there is none."""

    def __init__(self, control: ControlChannel, act: Callable[[], Value]) -> None:
        outcome: tuple[Value | None, str | None] = (None, None)
        try:
            if control.rank == 0:
                outcome = (act(), None)
        except (ChildFailed, OSError) as error:
            outcome = (None, str(error))
        self.value, self.reason = control.first(outcome)


def python(*words: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> str:
    """The output of a Python process outside this job. Raises ChildFailed."""
    own = {**detect.without_job(os.environ), **(env or {})}
    environ = {name: value for name, value in own.items() if name not in detect.TORCH_VARIABLES}
    ended = run([sys.executable, *words], environ, limit_s)
    if ended.status is None:
        raise ChildFailed(f"no end after {limit_s:g} s: python {' '.join(words)}")
    if ended.status != 0:
        raise ChildFailed(f"exit status {ended.status}: python {' '.join(words)}: {ended.last_words()}", ended.errors)
    return ended.output


def job(ranks: int, *words: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> str:
    """The output of a job of ``ranks`` ranks on this host. Raises ChildFailed."""
    command = ("-m", "mpicoll.run", "--quiet", "-n", str(ranks), *words)
    try:
        return python(*command, env=env, limit_s=limit_s)
    except ChildFailed as failed:
        if NEVER_BEGAN not in failed.words:
            raise
    return python(*command, env=env, limit_s=limit_s)
