"""Machines made of Linux namespaces: own host names, addresses, /dev/shm; ranks on them can only talk by TCP.

    host1 --eth0-- vh1 \\
                         bridge, in a namespace of its own
    host2 --eth0-- vh2 /

Needs root and `unshare`, `nsenter`, `ip` (Debian: util-linux, iproute2). mpiexec reaches a host by a launch agent, which takes
ssh's place: it skips ssh's options and enters the namespaces of the host that is named.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT, run

NETWORK = "10.77.0"
TOOLS = ("unshare", "nsenter", "ip")
BORN_S = 5.0  # seconds for a namespace to come up; it takes a tenth of that


@dataclass
class Hosts:
    """Hosts that are up. ``folder``: where their files are."""

    names: list[str]
    pids: list[int]
    folder: Path

    def hostfile(self, slots: int) -> Path:
        path = self.folder / "hosts.txt"
        path.write_text("".join(f"{name} slots={slots}\n" for name in self.names))
        return path

    def launch(self, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """``python -m mpicoll.run arguments...``, on the first host."""
        agent = str(self.folder / "agent.sh")
        launchers = {"PRTE_MCA_plm_ssh_agent": agent, "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": agent}
        command = [*_enter(self.pids[0]), sys.executable, "-m", "mpicoll.run", *arguments]
        return run(command, timeout_s, env={"OMP_NUM_THREADS": "1", **launchers})


def missing() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    links = "ip link add name br0 type bridge && ip link add name v0 type veth peer name v1"
    trial = f"{links} && hostname h && mount -t tmpfs t /dev/shm"
    command = ["unshare", "--net", "--uts", "--mount", "--ipc", "sh", "-c", trial]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return None if tried.returncode == 0 else f"this machine allows no such namespaces: {tried.stderr.strip()}"


def _enter(pid: int) -> list[str]:
    return ["nsenter", "-t", str(pid), "--net", "--uts", "--mount", "--ipc", f"--wd={ROOT}", "--"]


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """That many, until the end of the block. Raises: RuntimeError: what a command said."""
    names = [f"mpihost{i + 1}" for i in range(count)]
    table = "".join(f"{NETWORK}.{i + 1} {name}\n" for i, name in enumerate(names))
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + table)
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_namespace("--net"))
        into_switch = ["nsenter", "-t", str(switch), "--net", "--"]
        _do(*into_switch, "ip", "link", "add", "bridge0", "type", "bridge")
        _do(*into_switch, "ip", "link", "set", "bridge0", "up")
        pids = []
        for i, name in enumerate(names):
            pid = stack.enter_context(_namespace("--net", "--uts", "--mount", "--ipc"))
            pids.append(pid)
            inside = _enter(pid)
            _do(*inside, "hostname", name)
            _do(*inside, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
            _do(*inside, "mount", "--bind", str(folder / "hosts"), "/etc/hosts")
            _do(*into_switch, "ip", "link", "add", f"v{i}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            _do(*into_switch, "ip", "link", "set", f"v{i}", "master", "bridge0", "up")
            _do(*inside, "ip", "address", "add", f"{NETWORK}.{i + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do(*inside, "ip", "link", "set", device, "up")
        _write_agent(folder / "agent.sh", dict(zip(names, pids, strict=True)))
        yield Hosts(names, pids, folder)


@contextlib.contextmanager
def _namespace(*kinds: str) -> Iterator[int]:
    """Namespaces of these kinds, kept by a process that sleeps: its pid."""
    keeper = subprocess.Popen(["unshare", *kinds, "sleep", "3600"])
    try:
        deadline = time.monotonic() + BORN_S
        mine = os.readlink("/proc/self/ns/net")
        while os.readlink(f"/proc/{keeper.pid}/ns/net") == mine or Path(f"/proc/{keeper.pid}/comm").read_text() != "sleep\n":
            if time.monotonic() > deadline or keeper.poll() is not None:
                raise RuntimeError(f"unshare {' '.join(kinds)}: no namespace after {BORN_S:g} s")
            time.sleep(0.01)
        yield keeper.pid
    finally:
        keeper.kill()
        keeper.wait()


def _write_agent(path: Path, pids: dict[str, int]) -> None:
    cases = "\n".join(f"    {name}*|{NETWORK}.{i + 1}) pid={pid} ;;" for i, (name, pid) in enumerate(pids.items()))
    path.write_text(
        "#!/bin/sh\n# ssh [options] HOST command...\n"
        'while [ "${1#-}" != "$1" ]; do case $1 in -[a-zA-Z]) [ "$1" = -x ] || [ "$1" = -q ] || shift ;; esac; shift; done\n'
        f'host=$1; shift\ncase $host in\n{cases}\n    *) echo "agent: no host $host" >&2; exit 255 ;;\nesac\n'
        'exec nsenter -t $pid --net --uts --mount --ipc -- /bin/sh -c "$*"\n'
    )
    path.chmod(0o755)
