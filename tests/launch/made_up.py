"""Made-up MPIs and sites, and the plan of a job there."""

from dataclasses import replace
from typing import NamedTuple

import mpicoll._launch.find.hostfile as hostfile
from mpicoll._launch.find import allocation
from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch.job import NOTHING_ASKED, Plan, Program, Request, Site
from mpicoll._launch.plan import plan

OPENMPI = (Mpi("Open MPI", (5, 0, 11), "/o/lib/libmpi.so.40"), Mpiexec("/o/bin/mpiexec", "openmpi", (5, 0, 11)))
OPENMPI4 = (Mpi("Open MPI", (4, 1, 4), "/o/lib/libmpi.so.40"), Mpiexec("/o/bin/mpiexec", "openmpi", (4, 1, 4)))
MPICH = (Mpi("MPICH", (5, 0, 2), "/m/lib/libmpi.so.12"), Mpiexec("/m/bin/mpiexec", "mpich", (5, 0, 2)))


def a_site(cores: int = 8, uid: int = 1000, settings: frozenset[str] = frozenset(), **environ: str) -> Site:
    return Site(environ, cores, uid, ("here", "here.example.org"), lambda: 12345, settings, allocation.find(environ, str))


class Asked(NamedTuple):
    """A program, and where the user wants the ranks of the job."""

    program: Program
    hosts: tuple[hostfile.Host, ...] | None
    per_node: int | None


def one(ranks: int | None = None, hosts: str | None = None, per_node: int | None = None, name: str = "x.py") -> Asked:
    placed = None if hosts is None else hostfile.parse_list(hosts)
    return Asked(Program(("/py", name), ranks), placed, per_node)


def planned(
    first: Asked, *more: Asked, mpi: tuple[Mpi, Mpiexec] = OPENMPI, site: Site | None = None, request: Request = NOTHING_ASKED
) -> Plan:
    request = replace(request, hosts=first.hosts, per_node=first.per_node)
    return plan([each.program for each in (first, *more)], *mpi, site or a_site(), request)
