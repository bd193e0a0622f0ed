"""States of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from mpicoll._mpi import process_state
from mpicoll._mpi.process_state import ENDED, RUNS


def test_states_of_processes() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert process_state.of(child.pid) == RUNS == process_state.of(os.getpid())
    child.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while process_state.of(child.pid) == RUNS and time.monotonic() < deadline:
        time.sleep(0.01)
    stopped = process_state.of(child.pid)
    child.kill()
    child.wait()
    assert (stopped, process_state.of(child.pid)) == ("is stopped (SIGSTOP)", ENDED)
