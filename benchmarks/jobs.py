"""Jobs and processes that a script starts, and whose output it reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from mpicoll._base import inherited, torch_variables
from mpicoll._launch.find.ask import run

LIMIT_S = 600.0


class ChildFailed(Exception):
    """A child process failed."""


def python(*words: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> str:
    """The output of a Python process outside this job. Raises ChildFailed."""
    own = {**inherited.without_job(os.environ), **(env or {})}
    environ = {name: value for name, value in own.items() if name not in torch_variables.TORCH_VARIABLES}
    environ["PYTHONDONTWRITEBYTECODE"] = ""  # or every process would compile the source tree: 200 ms of CPU time
    ended = run([sys.executable, *words], environ, limit_s)
    if ended.status is None:
        raise ChildFailed(f"no end after {limit_s:g} s: python {' '.join(words)}")
    if ended.status != 0:
        raise ChildFailed(f"exit status {ended.status}: python {' '.join(words)}: {ended.last_words()}")
    return ended.output


def job(ranks: int, *words: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S) -> str:
    """The output of a job of ``ranks`` ranks on this host. Raises ChildFailed."""
    return python("-m", "mpicoll.run", "--quiet", "-n", str(ranks), *words, env=env, limit_s=limit_s)
