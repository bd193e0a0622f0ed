"""How a job that this process has started is ended from outside: gently, so that its mpiexec ends the ranks, and then not."""

from __future__ import annotations

import contextlib
import subprocess

STOP_WITHIN_S = 5.0  # after SIGTERM, mpiexec has this long to end its ranks before it is killed


def end(mpiexec: subprocess.Popen[bytes]) -> None:
    """Returns when it has ended; does nothing to one that has."""
    if mpiexec.poll() is None:
        mpiexec.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            mpiexec.wait(STOP_WITHIN_S)
    if mpiexec.poll() is None:
        mpiexec.kill()
        mpiexec.wait()
