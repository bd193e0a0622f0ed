"""The monitor of a rank, `mpicoll._launch.monitor`, without a launcher."""

import os
import signal
import subprocess
import sys

import pytest

from mpicoll._base.launcher import SUPERVISOR
from tests.support import ROOT

pytestmark = pytest.mark.launch

PROGRAM = """
import signal, sys, time
from mpicoll._launch import monitor

class Slow(monitor.Monitor):
    def run(self):
        time.sleep(1)
        return super().run()

monitor.Monitor = Slow
monitor.start()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: sys.exit(7))
print("ready", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_reaches_the_program_also_while_its_monitor_begins(number: int) -> None:
    """Launchers send it to the process group, of which the monitor is one. The program gets SIGKILL if the monitor dies."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), SUPERVISOR: "127.0.0.1 1 secret 5"}  # nothing listens there
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environ,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (7, "")
