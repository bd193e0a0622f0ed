"""Turns the request of the user into the command of mpiexec. Pure: all facts about the machine are in a `Site`.

    programs, hosts, options  ->  the host of each rank  ->  Plan: command, environment, notes

What is added to the environment: `mpicoll._launch.additions`.

# Note [Who reads the allocation]
Both kinds of mpiexec read Slurm's allocation, with the counts of all of Slurm's options; nothing is added there. Of the others,
Open MPI 5 reads PBS_NODEFILE only, Open MPI 4 what it was built with, and Hydra PBS_NODEFILE (MPICH 5.0.2 of PyPI ran on one host
in a job of LSF). Therefore the hosts of all other schedulers are on the command line. mpiexec starts its daemons by ssh, unless
it was built with the scheduler's library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from mpicoll._base.errors import LaunchError
from mpicoll._base.launcher import SUPERVISOR
from mpicoll._launch.additions import additions
from mpicoll._launch.command import command
from mpicoll._launch.find.hostfile import Host
from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch.job import LOCAL, NOTHING_ASKED, Job, Plan, Program, Request, Site, Where

# Variables that other hosts get. mpirun of Open MPI passes on OMPI_* by itself, Hydra everything.
FORWARDED = re.compile(
    r"(_?MPICOLL|MPI4PY|TORCH|TORCHINDUCTOR|PYTORCH|OMP|KMP|MKL|OPENBLAS|GLOO|NCCL|CUDA|UCX|FI|HF|WANDB)_[A-Z0-9_]+"
    r"|PYTHON[A-Z0-9_]*|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS)|LD_LIBRARY_PATH|LD_PRELOAD|MASTER_ADDR|MASTER_PORT|VIRTUAL_ENV"
)


def plan(programs: Sequence[Program], mpi: Mpi, mpiexec: Mpiexec, site: Site, request: Request = NOTHING_ASKED) -> Plan:
    """The command that starts ``programs`` as one job.

    Raises:
        LaunchError: The numbers contradict each other; the message names the remedy.
    """
    notes: list[str] = []
    hosts = _hosts(programs, site, request)
    counts = [_count(hosts, site, request, notes) if program.ranks is None else program.ranks for program in programs]
    places = None if hosts is None else _places(hosts, sum(counts), request.per_node)
    where = _where(places, site)
    job = Job(mpi, mpiexec, site, request, programs, counts, places, where)
    added = {**mpi.environ, **mpiexec.environ, **additions(job)}
    forwarded = (*filter(FORWARDED.fullmatch, (*site.environ, *added)), SUPERVISOR) if where.several_hosts else ()
    exported = (item.partition("=")[0] for item in request.exported)
    words = command(job, added, sorted({*forwarded, *exported}))
    return Plan(words, added, mpiexec.family, tuple(notes), where.other_hosts)


# --- how many ranks, and where ----------------------------------------------------------------------------------------


def _hosts(programs: Sequence[Program], site: Site, request: Request) -> tuple[Host, ...] | None:
    """The hosts that mpiexec is told; None: all ranks are here, or it knows them. Note [Who reads the allocation]."""
    allocated = () if site.allocation is None else tuple(Host(*node) for node in site.allocation.nodes)
    known, nodes = request.hosts or allocated, request.nodes
    if nodes is not None and not known and nodes > 1:
        raise LaunchError(
            f"--nnodes {nodes}: nothing says which nodes; name them with --host node1,node2 or --hostfile FILE, or start inside a"
            " job of a scheduler. mpicoll.run is started once, on one of them"
        )
    if nodes is not None and known and nodes > len(known):
        source = site.allocation if request.hosts is None else "the host list"
        raise LaunchError(f"--nnodes {nodes}: {source} has {len(known)}: {','.join(host.name for host in known)}")
    if request.hosts is not None or (nodes is not None and nodes < len(known)):
        return known[:nodes]
    if not known or site.reads_allocation or (len(known) == 1 and site.is_here(known[0].name.partition(".")[0])):
        return None
    if sum(program.ranks or 0 for program in programs) > sum(host.slots or 0 for host in known):
        return tuple(Host(host.name, None) for host in known)  # as under mpiexec of a site: slots are a default, not a limit
    return known


def _count(hosts: tuple[Host, ...] | None, site: Site, request: Request, notes: list[str]) -> int:
    """How many ranks there are, where the user has not said it."""
    allocation = site.allocation
    if request.per_node is not None:
        nodes: Sequence[object] = hosts or (() if allocation is None else allocation.nodes)
        return request.per_node * (len(nodes) or 1)
    ranks = site.cores
    if hosts is not None:
        ranks = sum(host.slots or 1 for host in hosts)
    elif allocation is not None:
        ranks = allocation.tasks
    if allocation is not None and request.hosts is None and (hosts is None or len(hosts) == len(allocation.nodes)):
        notes.append(f"{ranks} rank{'s' * (ranks > 1)}: the tasks of {allocation} (-n sets another number)")
    elif hosts is None:
        notes.append(f"{ranks} rank{'s' * (ranks > 1)}: one for each core that this process may use (-n sets another number)")
    if hosts is not None and any(host.slots is None for host in hosts):
        notes.append(f"{ranks} ranks: one for each host without a number (-n or --nproc-per-node sets another)")
    return ranks


def _places(hosts: Sequence[Host], ranks: int, per_node: int | None) -> list[str]:
    """The host of each rank: the hosts are filled in order."""
    alike = math.ceil(ranks / len(hosts)) if all(host.slots is None for host in hosts) else 1
    slots = [per_node or host.slots or alike for host in hosts]
    if sum(slots) < ranks:
        listed = ",".join(f"{host.name}:{n}" for host, n in zip(hosts, slots, strict=True))
        raise LaunchError(
            f"{ranks} ranks were asked for, but the hosts {listed} have {sum(slots)} places; raise the numbers of places, or"
            " lower -n"
        )
    return [host.name for host, offered in zip(hosts, slots, strict=True) for _ in range(offered)][:ranks]


def _where(places: Sequence[str] | None, site: Site) -> Where:
    hosts = tuple(dict.fromkeys(places or (name for name, _ in (site.allocation.nodes if site.allocation is not None else ()))))
    others = tuple(host for host in hosts if not site.is_here(host))
    if len(hosts) < 2 and (places is None or not others):
        return Where("localhost", False)
    return Where(hosts[0] if hosts[0] not in LOCAL else site.names[0], True, others)
