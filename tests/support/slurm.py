"""A real Slurm on the machines of hosts.py: slurmctld on the first one, slurmd on each, one munged for all of them.

Needs root and Debian's slurm-wlm, munge and libpmix2. Settings, keys, sockets and logs are in the folder of the hosts: nothing
of a Slurm that this machine may have is read or changed. Each host pretends to have `CPUS` CPUs.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mpicoll._base.cpus import longer
from tests.support import hosts as namespaces
from tests.support import is_open_mpi, run
from tests.support.hosts import PATH as PROGRAMS
from tests.support.hosts import Hosts

CPUS = 8
TOOLS = ("slurmctld", "slurmd", "munged", "srun", "salloc", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
UP_S = 30.0  # seconds until all nodes are idle; it takes 2
# Debian's plugin opens libpmix.so in this folder; only the package for developers has the file of that name.
PMIX = sorted(Path("/usr/lib").glob("*/pmix2/lib"))

SETTINGS = """
ClusterName=test
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2
KillWait=5
MailProg=/bin/true
NodeName={names} CPUS={cpus} State=UNKNOWN
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


@dataclass
class Slurm:
    """A Slurm that is up."""

    machines: Hosts
    settings: Path

    @property
    def pmi(self) -> str:
        """The type of ``srun --mpi`` for the MPI of this environment."""
        return "pmix" if is_open_mpi() else "pmi2"

    def run(self, *command: str, cwd: Path, timeout_s: float = 60, **environ: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first host, where the users of this Slurm are. ``python`` is this Python."""
        path = f"{Path(sys.executable).parent}:{PROGRAMS}"
        return run(
            [*self.machines.enter(0, cwd), *command], timeout_s, env={"SLURM_CONF": str(self.settings), "PATH": path, **environ}
        )

    def cancel_all(self) -> None:
        """Ends all jobs, so that none lives on into the next test."""
        self.run("scancel", "--user=root", cwd=self.settings.parent)
        wait_for(lambda: not self.queue(), "jobs that were cancelled are still there")

    def queue(self) -> str:
        return self.run("squeue", "--noheader", cwd=self.settings.parent).stdout.strip()

    def logs(self) -> str:
        """The last lines that the daemons wrote."""
        files = sorted(self.settings.parent.glob("*.log"))
        return "\n".join(f"{path.name}:\n" + "\n".join(path.read_text().splitlines()[-12:]) for path in files)


def missing() -> str | None:
    """Why there can be no Slurm here; None if there can."""
    absent = [tool for tool in TOOLS if shutil.which(tool, path=PROGRAMS) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if not any((folder / "libpmix.so.2").exists() for folder in PMIX):
        return "not installed: libpmix2"
    return namespaces.missing()


@contextlib.contextmanager
def slurm(count: int, folder: Path) -> Iterator[Slurm]:
    """One on that many hosts, until the end of the block. Raises: RuntimeError: what a command or a log said."""
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(namespaces.hosts(count, folder))
        _write_settings(machines)
        up = Slurm(machines, folder / "slurm.conf")
        stack.enter_context(_munged(folder))
        for i in range(count):
            _provide_pmix(machines, i)
        environ = {**os.environ, "PATH": PROGRAMS, "SLURM_CONF": str(up.settings)}
        _daemon(stack, [*machines.enter(0), "slurmctld", "-D", "-f", str(up.settings)], environ, folder / "slurmctld.out")
        for i, name in enumerate(machines.names):
            _daemon(stack, [*machines.enter(i), "slurmd", "-D", "-f", str(up.settings)], environ, folder / f"slurmd-{name}.out")
        idle = ("sinfo", "--noheader", "--Node", "--format=%T")
        wait_for(lambda: up.run(*idle, cwd=folder).stdout.split() == ["idle"] * count, "no idle nodes", up.logs)
        yield up


def wait_for(condition: Callable[[], bool], otherwise: str, details: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + longer(UP_S)
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Slurm: {otherwise} after {UP_S:g} s\n{details()}")
        time.sleep(0.1)


def _write_settings(machines: Hosts) -> None:
    folder = machines.folder
    (folder / "state").mkdir()
    for name in machines.names:
        (folder / f"spool-{name}").mkdir()
        (folder / f"tmp-{name}").mkdir()  # of PMIx; the hosts share /tmp
    text = SETTINGS.format(first=machines.names[0], folder=folder, names=",".join(machines.names), cpus=CPUS)
    (folder / "slurm.conf").write_text(text)


def _provide_pmix(machines: Hosts, host: int) -> None:
    """Shows the host a copy of Debian's folder in which the library has the name that the plugin opens."""
    for original in PMIX:
        copy = machines.folder / "pmix"
        if (original / "libpmix.so").exists():
            continue
        if not copy.exists():
            shutil.copytree(original, copy, symlinks=True)
            (copy / "libpmix.so").symlink_to("libpmix.so.2")
        subprocess.run([*machines.enter(host), "mount", "--bind", str(copy), str(original)], check=True)


@contextlib.contextmanager
def _munged(folder: Path) -> Iterator[None]:
    """munged, by which the programs of Slurm know each other. Its socket is a file, which all the hosts see."""
    key, socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    own = {"key-file": key, "socket": socket, "pid-file": folder / "munge.pid", "seed-file": folder / "munge.seed"}
    options = [f"--{name}={path}" for name, path in own.items()]
    program = shutil.which("munged", path=PROGRAMS)
    assert program is not None
    with contextlib.ExitStack() as stack:
        _daemon(stack, [program, "--foreground", "--force", *options], dict(os.environ), folder / "munged.log")
        wait_for(socket.exists, "no munged", (folder / "munged.log").read_text)
        yield


def _daemon(stack: contextlib.ExitStack, command: list[str], environ: dict[str, str], log: Path) -> None:
    """Starts one that ``stack`` will end."""
    with log.open("w") as file:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
