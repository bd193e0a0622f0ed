"""Turns the request of the user into the command of a launcher. Pure: all facts about the machine are in a `Site`.

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
from mpicoll._launch import launcher_command
from mpicoll._launch.additions import additions
from mpicoll._launch.command import binding_words, fault_tolerance_words, hydra_command, openmpi_command, output_words
from mpicoll._launch.find.allocation import Allocation
from mpicoll._launch.find.hostfile import Host
from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch.find.launchers import LAUNCHERS
from mpicoll._launch.job import LOCAL, NOTHING_ASKED, Placement, Plan, Program, Request, Site, Where

# Variables that other hosts get. mpirun of Open MPI passes on OMPI_* by itself, Hydra everything.
FORWARDED = re.compile(
    r"(_?MPICOLL|MPI4PY|TORCH|TORCHINDUCTOR|PYTORCH|OMP|KMP|MKL|OPENBLAS|GLOO|NCCL|CUDA|UCX|FI|HF|WANDB)_[A-Z0-9_]+"
    r"|PYTHON[A-Z0-9_]*|TORCHELASTIC_(RESTART_COUNT|MAX_RESTARTS)|LD_LIBRARY_PATH|LD_PRELOAD|MASTER_ADDR|MASTER_PORT|VIRTUAL_ENV"
)


def plan(
    programs: Sequence[Program],
    mpi: Mpi,
    mpiexec: Mpiexec,
    site: Site,
    extra: Sequence[str] = (),
    exported: Sequence[str] = (),
    request: Request = NOTHING_ASKED,
) -> Plan:
    """The command that starts ``programs`` as one job.

    Args:
        extra: Words for mpiexec itself.
        exported: Names of variables for every host.

    Raises:
        LaunchError: The numbers contradict each other; the message names the remedy.
    """
    notes: list[str] = []
    launched = mpiexec.family in LAUNCHERS  # these read the allocation of their scheduler by themselves
    hosts_named = any(program.hosts is not None for program in programs)
    if request.nodes is not None and (hosts_named or not launched):
        programs = _on_first_nodes(programs, request.nodes, site)
    if launched:
        site = site if hosts_named else _first_nodes_of(site, request.nodes)
        _check_counts(programs, site, mpiexec.family)
    else:
        extra = [*extra, *binding_words(request, mpi, mpiexec), *output_words(request, mpiexec)]
        extra += fault_tolerance_words(request, mpi, mpiexec)
        programs = _on_allocation(programs, site)
    hosts = _allocated_hosts(programs)
    counted = [_count(program, hosts, site, request.nodes, len(programs), notes) for program in programs]
    total = sum(ranks for _, ranks in counted)
    before = [sum(ranks for _, ranks in counted[:i]) for i in range(len(counted))]
    placements = [_place(program, ranks, hosts, before[i], total) for i, (program, ranks) in enumerate(counted)]
    per_node = programs[0].per_node if len(programs) == 1 else None
    where = _where(placements, total, site, per_node, launched)
    added = {**mpi.environ, **mpiexec.environ, **additions(where, mpi, site, request, notes, None if launched else extra)}
    if launched:
        nodes = request.nodes if site.allocation is None else len(site.allocation.nodes)
        each = where.ranks_per_host if site.allocation is not None else per_node
        layout = launcher_command.layout_of(placements[0], total, each, nodes)
        ran_on = where.hosts[: layout.nodes]
        command = launcher_command.command(mpiexec, counted, layout, ran_on, request, site.environ, extra)
        return Plan((mpiexec.path, *command), added, mpiexec.family, tuple(notes), tuple(placements), where.other_hosts)
    build = openmpi_command if mpiexec.family == "openmpi" else hydra_command
    forwarded = filter(FORWARDED.fullmatch, (*site.environ, *added)) if where.several_hosts else ()
    supervisor = (SUPERVISOR,) if where.several_hosts and request.supervised else ()
    names = sorted({*forwarded, *exported, *supervisor})
    command = [mpiexec.path, *extra, *build(counted, placements, added, names, where, request)]
    return Plan(tuple(command), added, mpiexec.family, tuple(notes), tuple(placements), where.other_hosts)


# --- how many ranks, and where ----------------------------------------------------------------------------------------


def _on_first_nodes(programs: Sequence[Program], nodes: int, site: Site) -> list[Program]:
    """The program, on the first ``nodes`` hosts of its list or of the scheduler's job."""
    if len(programs) > 1:
        raise LaunchError("--nnodes: several programs with `:` between them are placed by --host or --hostfile")
    program = programs[0]
    if program.hosts is not None:
        known, source = program.hosts, "the host list has"
    else:
        known, source = _hosts_of(site.allocation), f"{site.allocation} has"
    if not known and nodes > 1:
        raise LaunchError(
            f"--nnodes {nodes}: nothing says which nodes; name them with --host node1,node2 or --hostfile FILE, or start inside a"
            " job of a scheduler. mpicoll.run is started once, on one of them"
        )
    if known and nodes > len(known):
        raise LaunchError(f"--nnodes {nodes}: {source} {len(known)}: {','.join(host.name for host in known)}")
    if program.hosts is None and nodes in (len(known), 1 if not known else 0):
        return [program]  # the whole allocation, or all ranks are here
    return [replace(program, hosts=known[:nodes])]


def _first_nodes_of(site: Site, nodes: int | None) -> Site:
    """The site with the first ``nodes`` nodes of its allocation; None: all."""
    allocation = site.allocation
    if allocation is None or nodes is None or nodes == len(allocation.nodes):
        return site
    if nodes > len(allocation.nodes):
        raise LaunchError(f"--nnodes {nodes}: {allocation} has {len(allocation.nodes)}: {','.join(dict(allocation.nodes))}")
    first = allocation.nodes[:nodes]
    return replace(site, allocation=replace(allocation, nodes=first, tasks=sum(slots for _, slots in first)))


def _check_counts(programs: Sequence[Program], site: Site, launcher: str) -> None:
    """Raises LaunchError if nothing says how many ranks to start: outside a job, the cores of this host do not matter."""
    for program in programs:
        if site.allocation is None and program.ranks is None and program.hosts is None and program.per_node is None:
            raise LaunchError(f"{LAUNCHERS[launcher]}: outside a job of a scheduler, say how many ranks to start, with -n N")


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


def _allocated_hosts(programs: Sequence[Program]) -> tuple[Host, ...] | None:
    """The host list before the first program, which all programs share; None: there is none, or each program has its own."""
    if all(program.hosts is None for program in programs[1:]):
        return programs[0].hosts
    if any(program.hosts is None for program in programs):
        raise LaunchError(
            "some of the programs have --host and some do not; give it to each of them, or one list before the first program"
        )
    return None


def _count(
    program: Program, hosts: tuple[Host, ...] | None, site: Site, nodes: int | None, programs: int, notes: list[str]
) -> tuple[Program, int]:
    if program.ranks is not None:
        return program, program.ranks
    own = program.hosts if program.hosts is not None else (hosts if programs == 1 else None)
    if own is not None:
        if program.per_node is not None:
            return program, program.per_node * len(own)
        ranks = sum(host.slots or 1 for host in own)
        if site.allocation is not None and own == _hosts_of(site.allocation):
            notes.append(_tasks_note(ranks, site.allocation))
        if any(host.slots is None for host in own):
            notes.append(f"{ranks} ranks: one for each host without a number (-n or --nproc-per-node sets another)")
        return program, ranks
    if programs > 1:
        raise LaunchError(
            f"{' '.join(program.command)}: say how many ranks of it to start, with -n N; several programs with `:`"
            " between them each need one"
        )
    allocation = site.allocation
    if program.per_node is not None:
        return program, program.per_node * (len(_hosts_of(allocation)) or nodes or 1)
    if allocation is not None:
        notes.append(_tasks_note(allocation.tasks, allocation))
        return program, allocation.tasks
    notes.append(
        f"{site.cores} rank{'s' * (site.cores > 1)}: one for each core that this process may use (-n sets another number)"
    )
    return program, site.cores


def _tasks_note(ranks: int, allocation: Allocation) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}: the tasks of {allocation} (-n sets another number)"


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
        places = ",".join(f"{host.name}:{n}" for host, n in zip(hosts, slots, strict=True))
        raise LaunchError(
            f"{needed} ranks were asked for, but the hosts {places} have {sum(slots)} places; raise the numbers of"
            " places, or lower -n"
        )
    placed = []
    for host, offered in zip(hosts, slots, strict=True):
        skipped = min(start, offered)
        count = min(ranks, offered - skipped)
        start, ranks = start - skipped, ranks - count
        if count:
            placed.append((host.name, count))
    return tuple(placed)


def _slots(host: Host, program: Program, needed: int, hosts: tuple[Host, ...]) -> int:
    if program.per_node is not None:
        return program.per_node
    if host.slots is not None:
        return host.slots
    if all(other.slots is None for other in hosts):
        return math.ceil(needed / len(hosts))
    return 1


def _where(placements: Sequence[Placement | None], ranks: int, site: Site, per_node: int | None, launched: bool) -> Where:
    per_host: Counter[str] = Counter()
    for placement in placements:
        per_host.update(dict(placement or ()))
    if per_host:
        first = next(iter(per_host))
        local = sum(count for host, count in per_host.items() if site.is_here(host))
        several = len(per_host) > 1 or local == 0
        address = first if first not in LOCAL else site.names[0]
        others = tuple(host for host in per_host if not site.is_here(host))
        return Where(address if several else "localhost", several, local, max(per_host.values()), others, tuple(per_host))
    nodes = site.allocation.nodes if site.allocation is not None else ()
    if launched and not nodes:
        return Where("", True, 0, per_node or 1)  # the ranks find the first host by the variables of the scheduler, or by MPI
    if len(nodes) > 1 or (launched and not site.is_here(nodes[0][0].partition(".")[0])):
        on_a_node = math.ceil(ranks / len(nodes)) if sum(n for _, n in nodes) < ranks else max(n for _, n in nodes)
        on_a_node = per_node or on_a_node
        others = tuple(name for name, _ in nodes if not site.is_here(name))
        hosts, most = tuple(name for name, _ in nodes), min(on_a_node, ranks)
        return Where(nodes[0][0], True, most if len(others) < len(nodes) else 0, most, others, hosts)
    return Where("localhost", False, ranks, ranks, hosts=tuple(name for name, _ in nodes))
