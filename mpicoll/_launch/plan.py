"""Turns the request of the user into the command of mpiexec. Pure: all facts about the machine are in a `Site`.

    programs, hosts, options  ->  placements, ranks of each program on each host  ->  Plan: command, environment, notes

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mpicoll._base.errors import LaunchError
from mpicoll._base.launcher import SUPERVISOR
from mpicoll._launch.additions import additions
from mpicoll._launch.command import command
from mpicoll._launch.find.allocation import Allocation
from mpicoll._launch.find.hostfile import Host
from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch.job import LOCAL, NOTHING_ASKED, Job, Placement, Plan, Program, Request, Site, Where

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
    programs = _on_allocation(_on_first_nodes(programs, site, request.nodes), site)
    hosts = _common_hosts(programs)
    counted = [(program, _count(program, site, len(programs), notes)) for program in programs]
    total, before, placements = sum(ranks for _, ranks in counted), 0, []
    for program, ranks in counted:
        placements.append(_place(program, ranks, hosts, before, total))
        before += ranks
    per_node = programs[0].per_node if len(programs) == 1 else None
    where = _where(placements, total, site, per_node)
    job = Job(mpi, mpiexec, site, request, counted, placements, where)
    added = {**mpi.environ, **mpiexec.environ, **additions(job)}
    forwarded = filter(FORWARDED.fullmatch, (*site.environ, *added)) if where.several_hosts else ()
    supervisor = (SUPERVISOR,) if where.several_hosts and request.supervised else ()
    exported = (item.partition("=")[0] for item in request.exported)
    words = command(job, added, sorted({*forwarded, *exported, *supervisor}))
    return Plan(words, added, mpiexec.family, tuple(notes), tuple(placements), where.other_hosts)


# --- how many ranks, and where ----------------------------------------------------------------------------------------


def _on_first_nodes(programs: Sequence[Program], site: Site, nodes: int | None) -> Sequence[Program]:
    """The programs, on the first ``nodes`` hosts of the user's list, or nodes of the scheduler's job; None: all."""
    if nodes is None:
        return programs
    if len(programs) > 1:
        raise LaunchError("--nnodes: several programs with `:` between them are placed by --host or --hostfile")
    listed = programs[0].hosts is not None
    known = (programs[0].hosts or ()) if listed else _hosts_of(site.allocation)
    if not known and nodes > 1:
        raise LaunchError(
            f"--nnodes {nodes}: nothing says which nodes; name them with --host node1,node2 or --hostfile FILE, or start inside a"
            " job of a scheduler. mpicoll.run is started once, on one of them"
        )
    if known and nodes > len(known):
        source = "the host list" if listed else site.allocation
        raise LaunchError(f"--nnodes {nodes}: {source} has {len(known)}: {','.join(host.name for host in known)}")
    if not listed and nodes >= len(known):  # the whole allocation, or all ranks are here
        return programs
    return [replace(programs[0], hosts=known[:nodes])]


def _hosts_of(allocation: Allocation | None) -> tuple[Host, ...]:
    return tuple(Host(*node) for node in allocation.nodes) if allocation is not None else ()


def _on_allocation(programs: Sequence[Program], site: Site) -> Sequence[Program]:
    """The programs, on the nodes of the scheduler's job if the user has named no hosts. Note [Who reads the allocation]."""
    if site.reads_allocation or any(program.hosts is not None for program in programs):
        return programs
    hosts = _hosts_of(site.allocation)
    if not hosts or (len(hosts) == 1 and site.is_here(hosts[0].name.partition(".")[0])):
        return programs
    asked = sum(program.ranks or 0 for program in programs)
    if asked > sum(host.slots or 0 for host in hosts):  # as under mpiexec of a site: slots are a default, not a limit
        hosts = tuple(Host(host.name, None) for host in hosts)
    return [replace(programs[0], hosts=hosts), *programs[1:]]


def _common_hosts(programs: Sequence[Program]) -> tuple[Host, ...] | None:
    """The host list before the first program, which all programs share; None: there is none, or each program has its own."""
    if all(program.hosts is None for program in programs[1:]):
        return programs[0].hosts
    if any(program.hosts is None for program in programs):
        raise LaunchError(
            "some of the programs have --host and some do not; give it to each of them, or one list before the first program"
        )
    return None


def _count(program: Program, site: Site, programs: int, notes: list[str]) -> int:
    """How many ranks run the program."""
    hosts, allocation = program.hosts, site.allocation
    if program.ranks is not None:
        return program.ranks
    if hosts is None and programs > 1:
        raise LaunchError(
            f"{' '.join(program.command)}: say how many ranks of it to start, with -n N; several programs with `:`"
            " between them each need one"
        )
    if program.per_node is not None:
        return program.per_node * (len(_hosts_of(allocation) if hosts is None else hosts) or 1)
    ranks = site.cores
    if hosts is not None:
        ranks = sum(host.slots or 1 for host in hosts)
    elif allocation is not None:
        ranks = allocation.tasks
    if allocation is not None and hosts in (None, _hosts_of(allocation)):
        notes.append(f"{ranks} rank{'s' * (ranks > 1)}: the tasks of {allocation} (-n sets another number)")
    elif hosts is None:
        notes.append(f"{ranks} rank{'s' * (ranks > 1)}: one for each core that this process may use (-n sets another number)")
    if hosts is not None and any(host.slots is None for host in hosts):
        notes.append(f"{ranks} ranks: one for each host without a number (-n or --nproc-per-node sets another)")
    return ranks


def _place(program: Program, ranks: int, common: tuple[Host, ...] | None, before: int, total: int) -> Placement | None:
    """The ranks of the program on its hosts, filled in order; None: the scheduler decides, or all ranks run on this host.

    Args:
        common: The host list of all ``total`` ranks, of which earlier programs fill ``before`` places; None: the program has
        its own.
    """
    hosts = program.hosts if common is None else common
    if hosts is None:
        return None
    start, needed = (0, ranks) if common is None else (before, total)
    slots = [_slots(host, program, needed, hosts) for host in hosts]
    if sum(slots) < start + ranks:
        listed = ",".join(f"{host.name}:{n}" for host, n in zip(hosts, slots, strict=True))
        raise LaunchError(
            f"{needed} ranks were asked for, but the hosts {listed} have {sum(slots)} places; raise the numbers of"
            " places, or lower -n"
        )
    places = [host.name for host, offered in zip(hosts, slots, strict=True) for _ in range(offered)]
    return tuple(Counter(places[start : start + ranks]).items())


def _slots(host: Host, program: Program, needed: int, hosts: tuple[Host, ...]) -> int:
    if program.per_node is not None:
        return program.per_node
    if host.slots is not None:
        return host.slots
    if all(other.slots is None for other in hosts):
        return math.ceil(needed / len(hosts))
    return 1


def _where(placements: Sequence[Placement | None], ranks: int, site: Site, per_node: int | None) -> Where:
    per_host: Counter[str] = Counter()
    for placement in placements:
        per_host.update(dict(placement or ()))
    nodes = site.allocation.nodes if site.allocation is not None else ()
    if not per_host and len(nodes) > 1:
        spread = math.ceil(ranks / len(nodes)) if sum(n for _, n in nodes) < ranks else max(n for _, n in nodes)
        per_host.update({name: min(per_node or spread, ranks) for name, _ in nodes})  # the most that one of them may get
    if per_host:
        first, others = next(iter(per_host)), tuple(host for host in per_host if not site.is_here(host))
        several = len(per_host) > 1 or others != ()
        address = first if first not in LOCAL else site.names[0]
        here = sum(count for host, count in per_host.items() if host not in others)
        return Where(address if several else "localhost", several, here, max(per_host.values()), others, tuple(per_host))
    return Where("localhost", False, ranks, ranks, hosts=tuple(name for name, _ in nodes))
