"""Runs a command with a time limit, for what could hang or crash: MPI, torch, a trial job, a tool of the system.

A report is a line that begins with `MARK` and goes on with a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpicoll._base.probe import MARK
from mpicoll._base.waits import STOP_S


@dataclass(frozen=True)
class Ended:
    """A process that has ended. status: its exit status, negative for a signal; None: it ran out of time and was ended."""

    output: str
    errors: str
    status: int | None

    def last_words(self, lines: int = 1) -> str:
        """The last lines of standard error, or of standard output where standard error is empty; no empty or ruled lines."""
        text = self.errors.strip() or self.output.strip()
        words = [line.strip() for line in text.splitlines() if line.strip(" -")]
        return "\n".join(words[-lines:]) or f"status {self.status}, without a word"


def run(command: Sequence[str], environ: Mapping[str, str], timeout_s: float, keep_files: bool = False) -> Ended:
    """Runs ``command`` without input. After ``timeout_s`` it gets SIGTERM, so that an mpiexec can end its ranks, then SIGKILL.

    Args:
        keep_files: The process inherits our open files, through which Hydra lets a rank talk to it.

    Raises:
        OSError: The command cannot be started.
    """
    # Files, not pipes: a process that outlives the command would keep a pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output, tempfile.TemporaryFile("w+", errors="replace") as errors:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
            close_fds=not keep_files, start_new_session=True,
        )  # fmt: skip
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)  # after Ctrl-C too, which does not reach the new session
        if status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what an mpiexec that was killed has left
        output.seek(0)
        errors.seek(0)
        return Ended(output.read(), errors.read(), status)


def end(mpiexec: subprocess.Popen[bytes], grace_s: float = STOP_S) -> None:
    """Ends a job: SIGTERM first, so that mpiexec can end its ranks, then SIGKILL. Does nothing if it has ended."""
    mpiexec.terminate()
    try:
        mpiexec.wait(grace_s)
    except subprocess.TimeoutExpired:
        mpiexec.kill()
        mpiexec.wait()


def output_of(command: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> str | None:
    """What a tool prints, to standard output and then to standard error; None: it cannot be started, or runs out of time."""
    try:
        ended = run(command, environ, timeout_s)
    except OSError:
        return None
    return None if ended.status is None else ended.output + ended.errors


def ask(
    command: Sequence[str], environ: Mapping[str, str], timeout_s: float, keep_files: bool = False, lines: int = 1
) -> dict[str, Any]:
    """The report that ``command`` prints. Without one: "error", a text, and "status", as in `Ended`.

    Args:
        lines: How many of the last lines of a failed command make the text.
    """
    ended = run(command, environ, timeout_s, keep_files)
    for line in reversed(ended.output.splitlines()):
        if line.startswith(MARK):
            report: dict[str, Any] = json.loads(line[len(MARK) :])
            return report
    if ended.status is None:
        return {"error": f"no end within {timeout_s:g} s (MPICOLL_PROBE_TIMEOUT sets the limit)", "status": None}
    return {"error": ended.last_words(lines), "status": ended.status}
