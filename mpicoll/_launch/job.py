"""The values that the steps of a launch exchange: request, programs, site, plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mpicoll._base.waits import STOP_S
from mpicoll._launch.find.allocation import Allocation
from mpicoll._launch.find.hostfile import Host

LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Request:
    """Options of the user for the whole job; None: not set."""

    mpi: str | None = None
    dry_run: bool = False
    quiet: bool = False
    verbose: bool = False
    grace_s: float = STOP_S  # between SIGTERM and SIGKILL
    mpiexec_args: tuple[str, ...] = ()
    exported: tuple[str, ...] = ()  # NAME or NAME=VALUE
    hosts: tuple[Host, ...] | None = None
    nodes: int | None = None
    per_node: int | None = None
    bind_to: str | None = None
    map_by: str | None = None
    tag_output: bool = False
    fault_tolerant: bool = False
    restart: int = 0  # 1 for the first restart
    max_restarts: int | None = None
    notes: tuple[str, ...] = ()  # sentences for the user about some options


NOTHING_ASKED = Request()


class Program(NamedTuple):
    """One program of the job: the command line of its ranks, and their number; None: not set by the user."""

    command: tuple[str, ...]
    ranks: int | None = None


@dataclass(frozen=True)
class Site:
    """The machine that the launch starts from."""

    environ: Mapping[str, str]
    cores: int  # that this process may use
    uid: int
    names: tuple[str, ...]  # names of this host, the usual one first
    free_port: Callable[[], int]
    settings: frozenset[str] = frozenset()  # MCA settings in files of the user, named as in the environment
    allocation: Allocation | None = None  # of the scheduler
    in_step: bool = False  # of srun: this process is a task, for example the shell of `srun --pty bash`

    def decided(self, name: str) -> bool:
        return name in self.environ or name in self.settings

    def is_here(self, host: str) -> bool:
        return host in self.names or host in LOCAL

    @property
    def reads_allocation(self) -> bool:
        """Whether mpiexec reads the allocation of the scheduler by itself; Note [Who reads the allocation] in _launch/plan.py."""
        return self.allocation is not None and self.allocation.scheduler == "Slurm"


@dataclass(frozen=True)
class Plan:
    """The command to execute, with ``added`` in its environment. notes: sentences for the user."""

    command: tuple[str, ...]
    added: dict[str, str]
    family: str  # of the mpiexec
    notes: tuple[str, ...] = ()
    other_hosts: tuple[str, ...] = ()  # as far as they are known
