"""What is to be started, where, and the resulting command: the values that the parts of a launch hand to each other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mpicoll._launch.hostfile import Host

Placement = tuple[tuple[str, int], ...]  # (host, ranks there) in rank order


@dataclass(frozen=True)
class Request:
    """What holds for the whole job, as the user has said it; None: not said."""

    nodes: int | None = None
    bind_to: str | None = None
    map_by: str | None = None
    tag_output: bool = False
    log_dir: str | None = None  # absolute


NOTHING_ASKED = Request()


@dataclass(frozen=True)
class Program:
    """One program of the job: its command line, and how many ranks of it run where. None: not said.

    python: the interpreter that runs ``command`` (script.py args..., or -m module args...); None: ``command`` runs as
    it is. flags: options of the interpreter."""

    command: tuple[str, ...]
    ranks: int | None = None
    hosts: tuple[Host, ...] | None = None
    per_node: int | None = None
    python: str | None = None
    flags: tuple[str, ...] = ()

    def words(self, family: str, request: Request) -> tuple[str, ...]:
        """The command line of a rank under an mpiexec of ``family``.

        It goes through `mpicoll._launch.rank` where mpiexec does too little: Hydra lets a job go on without a rank that
        has failed before MPI and mixes the ranks' lines, and no mpiexec of today writes one plain file for each rank.
        """
        to_file = [] if request.log_dir is None else ["--log-dir", request.log_dir]
        if self.python is None:
            return ((sys.executable, "-m", "mpicoll._launch.rank", *to_file, "--exec") if to_file else ()) + self.command
        # -u, as torchrun: what a rank prints does not wait in its buffer, and is not lost when the job is ended from
        # outside
        rank = ("-m", "mpicoll._launch.rank", *to_file) if family == "mpich" or to_file else ()
        return (self.python, "-u", *self.flags, *rank, *self.command)


@dataclass(frozen=True)
class Site:
    """The machine that the launch starts from."""

    environ: Mapping[str, str]
    cores: int  # usable by us here
    uid: int
    names: tuple[str, ...]  # this host's own names, the usual one first
    free_port: Callable[[], int]
    settings: frozenset[str] = frozenset()  # MCA settings in the user's own files, as "OMPI_MCA_btl" would be in the environment

    def decided(self, name: str) -> bool:
        return name in self.environ or name in self.settings

    def is_here(self, host: str) -> bool:
        return host in self.names or host in ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Plan:
    """What to execute: ``command`` under ``environ`` plus ``added``; ``notes`` are sentences for the user."""

    command: tuple[str, ...]
    added: dict[str, str]
    family: str  # of the mpiexec
    notes: tuple[str, ...] = ()
    placements: tuple[Placement | None, ...] = field(default=())


@dataclass(frozen=True)
class Where:
    """The job's extent, as far as it is known before the start."""

    first_host: str
    several_hosts: bool
    ranks_here: int  # on this host
    ranks_per_host: int  # the most on one host
