"""Machines made of Linux namespaces: own host names, addresses, /dev/shm; ranks on them can only talk by TCP.

    host1 --eth0-- vh1 \\
                         bridge, in a namespace of its own
    host2 --eth0-- vh2 /

Needs root and `unshare`, `nsenter`, `ip`, `ssh`, `sshd` (Debian: util-linux, iproute2, openssh-client, openssh-server). Each host
runs an sshd, by which mpiexec reaches it; keys and settings are made for the occasion, and nobody's own are read.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT, run

NETWORK = "10.77.0"
TOOLS = ("unshare", "nsenter", "ip", "ssh", "sshd", "ssh-keygen")
PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
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
        return run(self.command(*arguments), timeout_s, env=self.environment())

    def command(self, *arguments: str) -> list[str]:
        return [*self.enter(0), sys.executable, "-m", "mpicoll.run", *arguments]

    def enter(self, host: int, folder: Path = ROOT) -> list[str]:
        """What stands before a command that is to run on that host, in ``folder``."""
        return _enter(self.pids[host], folder)

    def environment(self) -> dict[str, str]:
        """What ``command`` needs so that mpiexec reaches the hosts."""
        options = f"-F {self.folder / 'ssh_config'}"
        launchers = {"PRTE_MCA_plm_ssh_args": options, "HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXTRA_ARGS": options}
        return {"OMP_NUM_THREADS": "1", **launchers}

    def limit(self, mbit: int, queue_ms: int) -> None:
        """Limits what each card sends to that many Mbit/s, with a queue of that length."""
        shape = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", f"{queue_ms}ms")
        for pid in self.pids:
            _do(*_enter(pid), "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)

    def cut(self, host: int) -> None:
        """Pulls the cable of one host."""
        _do(*_enter(self.pids[host]), "ip", "link", "set", "eth0", "down")


def missing() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    links = "ip link add name br0 type bridge && ip link add name v0 type veth peer name v1"
    trial = f"{links} && hostname h && mount -t tmpfs t /dev/shm"
    command = ["unshare", "--net", "--uts", "--mount", "--ipc", "sh", "-c", trial]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return None if tried.returncode == 0 else f"this machine allows no such namespaces: {tried.stderr.strip()}"


def _enter(pid: int, folder: Path = ROOT) -> list[str]:
    return ["nsenter", "-t", str(pid), "--net", "--uts", "--mount", "--ipc", f"--wd={folder}", "--"]


def _congestion() -> str:
    """Linux's default, as on a cluster, or the one that every kernel has.

    This machine may be set to BBR. BBR takes the pauses between calls for a slow network: with it, single calls of 1 MiB took 40
    to 130 ms more.
    """
    return "cubic" if "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split() else "reno"


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
            route = f"{NETWORK}.0/24 dev eth0 src {NETWORK}.{i + 1} congctl {_congestion()}"
            _do(*inside, "ip", "route", "change", *route.split())
        _write_keys(folder)
        for i, pid in enumerate(pids):
            stack.enter_context(_sshd(pid, f"{NETWORK}.{i + 1}", folder))
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
        own = os.readlink(f"/proc/{keeper.pid}/ns/net")
        assert own != mine
        try:
            yield keeper.pid
        finally:
            _end_all_in(own)
    finally:
        keeper.kill()
        keeper.wait()


def _end_all_in(network: str) -> None:
    """A launcher may leave an ssh or a daemon where a cable was cut."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if os.readlink(process / "ns" / "net") == network:
                os.kill(int(process.name), signal.SIGKILL)


def _write_keys(folder: Path) -> None:
    """One key that opens every host, and serves as every host's own."""
    key, known = folder / "key", folder / "authorized_keys"
    _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    known.write_text((folder / "key.pub").read_text())
    (folder / "sshd_config").write_text(
        f"HostKey {key}\nAuthorizedKeysFile {known}\nPermitRootLogin prohibit-password\nStrictModes no\nUsePAM no\nPidFile none\n"
    )
    (folder / "ssh_config").write_text(
        f"IdentityFile {key}\nIdentitiesOnly yes\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )


@contextlib.contextmanager
def _sshd(pid: int, address: str, folder: Path) -> Iterator[None]:
    """One that listens on that address, within those namespaces."""
    Path("/run/sshd").mkdir(exist_ok=True)  # it insists
    program = shutil.which("sshd", path=PATH)
    assert program is not None
    command = [program, "-D", "-e", "-f", str(folder / "sshd_config"), "-o", f"ListenAddress={address}"]
    log = folder / f"sshd-{address}.log"
    with log.open("w") as file:
        server = subprocess.Popen([*_enter(pid), *command], stderr=file)
    try:
        deadline = time.monotonic() + BORN_S
        while "listening" not in log.read_text():
            if time.monotonic() > deadline or server.poll() is not None:
                raise RuntimeError(f"sshd on {address}: {log.read_text().strip()}")
            time.sleep(0.01)
        yield
    finally:
        server.terminate()
        server.wait()
