"""Ends a job that this process has started: SIGTERM first, so that mpiexec can end its ranks, then SIGKILL."""

from __future__ import annotations

import contextlib
import subprocess

from mpicoll._base.waits import STOP_S


def end(mpiexec: subprocess.Popen[bytes]) -> None:
    """Ends the process and waits for it. Does nothing if it has ended."""
    if mpiexec.poll() is None:
        mpiexec.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            mpiexec.wait(STOP_S)
    if mpiexec.poll() is None:
        mpiexec.kill()
        mpiexec.wait()
