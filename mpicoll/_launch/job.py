"""The values that the steps of a launch exchange: request, programs, site, plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpicoll._base.waits import STOP_S
from mpicoll._launch.find.allocation import Allocation
from mpicoll._launch.find.hostfile import Host
from mpicoll._launch.find.installations import Mpi, Mpiexec

Placement = tuple[tuple[str, int], ...]  # (host, ranks there) in rank order
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
    mca: tuple[tuple[str, str], ...] = ()  # settings of Open MPI
    nodes: int | None = None
    bind_to: str | None = None
    map_by: str | None = None
    tag_output: bool = False
    log_dir: str | None = None  # absolute
    fault_tolerant: bool = False
    oversubscribe: bool = False
    restart: int = 0  # 1 for the first restart
    max_restarts: int | None = None
    supervised: bool = False  # a monitor for each rank; `mpicoll._launch.monitor`
    notes: tuple[str, ...] = ()  # sentences for the user about some options

    def extra_words(self) -> list[str]:
        """Words of the user for mpiexec; they override those of mpicoll."""
        return [*self.mpiexec_args, *(word for setting in self.mca for word in ("--mca", *setting))]


NOTHING_ASKED = Request()


@dataclass(frozen=True)
class Program:
    """One program of the job; None: not set by the user.

    Args:
        command: ``script.py args...``, or ``-m module args...``.
        ranks: How many ranks run it.
        hosts: Where they run.
        per_node: How many run on each node.
        python: The interpreter for ``command``; None: ``command`` is executed itself.
        flags: Options of the interpreter.
    """

    command: tuple[str, ...]
    ranks: int | None = None
    hosts: tuple[Host, ...] | None = None
    per_node: int | None = None
    python: str | None = None
    flags: tuple[str, ...] = ()

    def words(self, request: Request) -> tuple[str, ...]:
        """The command line of a rank.

        `mpicoll._launch.rank` runs the program where mpiexec lacks something: no mpiexec says how each rank ended, or writes one
        plain file for each rank; Hydra lets a job continue after a rank has failed before MPI_Init, and mixes the lines of ranks.
        """
        to_file = [] if request.log_dir is None else ["--log-dir", request.log_dir]
        if self.python is None:
            by_rank = (sys.executable, "-m", "mpicoll._launch.rank", *to_file, "--exec")
            return (by_rank if to_file or request.supervised else ()) + self.command
        # -u, as in torchrun: output does not stay in a buffer, where it is lost if the job is killed
        rank = ("-m", "mpicoll._launch.rank", *to_file) if to_file or request.supervised else ()
        return (self.python, "-u", *self.flags, *rank, *self.command)


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
class Where:
    """Where the job runs, as far as it is known before the start."""

    first_host: str
    several_hosts: bool
    ranks_here: int  # on this host
    ranks_per_host: int  # the most on one host
    other_hosts: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # the known hosts of ranks; empty: this host only


@dataclass(frozen=True)
class Job:
    """What a plan is made of.

    Args:
        counted: The programs, with the number of ranks of each.
        placements: Of each program.
    """

    mpi: Mpi
    mpiexec: Mpiexec
    site: Site
    request: Request
    counted: Sequence[tuple[Program, int]]
    placements: Sequence[Placement | None]
    where: Where


@dataclass(frozen=True)
class Plan:
    """The command to execute, with ``added`` in its environment. notes: sentences for the user."""

    command: tuple[str, ...]
    added: dict[str, str]
    family: str  # of the mpiexec
    notes: tuple[str, ...] = ()
    placements: tuple[Placement | None, ...] = ()
    other_hosts: tuple[str, ...] = ()  # as far as they are known
