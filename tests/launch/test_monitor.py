"""The monitor of a rank, `mpicoll._launch.monitor`, without a launcher."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpicoll._base.inherited import SUPERVISOR
from mpicoll._launch import linux
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


@pytest.mark.parametrize(
    ("cgroup", "counter", "text"),
    [
        ("", "proc/vmstat", "oom_kill_x 7\noom_kill {}\n"),
        ("0::/job 1/a:b\n", "sys/fs/cgroup/job 1/a:b/memory.events", "low 0\noom 9\noom_kill {}\noom_group_kill 0\n"),
        ("0::/\n", "sys/fs/cgroup/memory.events", "oom_kill {}\n"),
        ("7:cpu:/\n4:memory:/j\n", "sys/fs/cgroup/memory/j/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ],
)
def test_how_often_the_kernel_has_run_out_of_memory(cgroup: str, counter: str, text: str, tmp_path: Path) -> None:
    assert linux.oom_kills(str(tmp_path)) == 0  # nothing can be read
    for name, words in {"proc/self/cgroup": cgroup, counter: text.format(12)}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(words)
    assert linux.oom_kills(str(tmp_path)) == 12


KILLED = """
import os, signal
from mpicoll._launch import linux, monitor
counts = iter({counts})
linux.oom_kills = lambda: next(counts)
monitor.start()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("counts", "said"), [((3, 4), [{"oom": True}]), ((3, 3), [])])
def test_the_monitor_of_a_killed_rank_says_if_memory_was_short(counts: tuple[int, int], said: list[dict[str, bool]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        words = f"127.0.0.1 {server.getsockname()[1]} secret 5"
        environ = {**os.environ, "PYTHONPATH": str(ROOT), SUPERVISOR: words, "PMI_RANK": "0", "PMI_SIZE": "1"}
        with subprocess.Popen([sys.executable, "-c", KILLED.format(counts=counts)], env=environ):
            connection, _ = server.accept()
            with connection.makefile() as lines:
                begin, *others, ended = lines.read().splitlines()
    assert (begin.split()[0], [json.loads(line) for line in others], json.loads(ended)["status"]) == ("secret", said, -9)
