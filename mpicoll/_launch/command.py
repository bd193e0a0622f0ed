"""The command line of a planned job, for mpiexec of Open MPI or Hydra. Pure.

    option                Open MPI 5             Open MPI 4              Hydra (MPICH)
    --bind-to socket      --bind-to package      --bind-to socket        -bind-to socket
    --map-by numa         --map-by numa          --map-by numa           -map-by numa -bind-to numa
    --tag-output          --output tag           --tag-output            -prepend-rank
    --log-dir DIR         mpicoll._launch.rank   mpicoll._launch.rank    mpicoll._launch.rank
    --fault-tolerant      --with-ft ulfm         refused                 refused

# Note [Log files]
The options of mpiexec for output files differ: Open MPI 5.0.11 loses standard error with --output dir=DIR and names files after
its process with --output file=NAME, Open MPI 4 makes a folder for each job, and Hydra needs the folder on every host
beforehand. Therefore each rank redirects its own output before the program starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mpicoll._base.errors import LaunchError
from mpicoll._launch.find.installations import Mpi, Mpiexec
from mpicoll._launch.job import Placement, Program, Request, Where

Counted = Sequence[tuple[Program, int]]
Placements = Sequence[Placement | None]


OPENMPI_UNITS = ("none", "hwthread", "core", "l1cache", "l2cache", "l3cache", "numa", "package", "socket")
HYDRA_UNITS = re.compile(
    r"(machine|numa|socket|core|hwthread|l[1-5][diu]?cache|gpu|ib|en|eth|hfi|hsn)\d*(:\d+)?|pci:.+"
)  # with a number: that many units for each rank


def binding_words(request: Request, mpi: Mpi, mpiexec: Mpiexec) -> list[str]:
    """--bind-to and --map-by for ``mpiexec``. Raises LaunchError for an unknown unit; the message lists the known ones."""
    if request.bind_to is None and request.map_by is None:
        return []
    if mpi.vendor == "Intel MPI":
        raise LaunchError("--bind-to and --map-by: Intel MPI binds by its own variables; set I_MPI_PIN_DOMAIN=core, or auto")
    if mpiexec.family == "openmpi":
        return _openmpi_binding(request, mpiexec)
    return _hydra_binding(request)


def _openmpi_binding(request: Request, mpiexec: Mpiexec) -> list[str]:
    name = "package" if mpiexec.version[:1] >= (5,) else "socket"
    words = []
    if request.map_by is not None:
        words += ["--map-by", re.sub(r"\b(socket|package)\b", name, request.map_by)]
    if request.bind_to is not None:
        unit, colon, modifier = request.bind_to.partition(":")
        if modifier.isdigit():
            raise LaunchError(
                f"--bind-to {request.bind_to}: Open MPI binds to one {unit}; `--map-by slot:pe={modifier} --bind-to core` gives"
                f" each rank {modifier} cores"
            )
        if unit not in OPENMPI_UNITS:
            raise LaunchError(f"--bind-to {request.bind_to}: Open MPI binds to one of {', '.join(OPENMPI_UNITS)}")
        words += ["--bind-to", re.sub(r"^(socket|package)\b", name, unit) + colon + modifier]
    return words


def _hydra_binding(request: Request) -> list[str]:
    words = []
    bind_to = None if request.bind_to is None else _hydra_unit("--bind-to", request.bind_to, ("none", "rr", "user:"))
    if request.map_by not in (None, "slot"):  # by slot is the default of Hydra
        map_by = _hydra_unit("--map-by", str(request.map_by), ())
        words += ["-map-by", map_by]
        bind_to = map_by if bind_to is None else bind_to  # as Open MPI does; without binding Hydra ignores the mapping
    return [*words, *(["-bind-to", bind_to] if bind_to is not None else [])]


def _hydra_unit(option: str, text: str, others: tuple[str, ...]) -> str:
    unit = re.sub(r"^package\b", "socket", text)
    if HYDRA_UNITS.fullmatch(unit) or unit in others or unit.startswith(tuple(word for word in others if word.endswith(":"))):
        return unit
    allowed = ", ".join([*others, "hwthread", "core", "core:2", "l3cache", "numa", "socket", "machine"])
    raise LaunchError(f"{option} {text}: MPICH's mpiexec takes {allowed.replace('user:', 'user:0,1')}")


def output_words(request: Request, mpiexec: Mpiexec) -> list[str]:
    """--tag-output for ``mpiexec``."""
    if not request.tag_output:
        return []
    if mpiexec.family == "mpich":
        return ["-prepend-rank"]
    return ["--output", "tag"] if mpiexec.version[:1] >= (5,) else ["--tag-output"]


def fault_tolerance_words(request: Request, mpi: Mpi, mpiexec: Mpiexec) -> list[str]:
    """--fault-tolerant for ``mpiexec``. Raises LaunchError if this MPI ends the job when a rank dies."""
    if not request.fault_tolerant:
        return []
    if mpi.vendor != "Open MPI" or mpi.version[:1] < (5,) or mpiexec.family != "openmpi":
        version = ".".join(map(str, mpi.version))
        raise LaunchError(
            f"--fault-tolerant: {mpi.vendor} {version} ends the job when a rank dies; Open MPI 5 can go on"
            " (--mpi openmpi). With every MPI, programs can save checkpoints and start again"
        )
    return ["--with-ft", "ulfm"]


def openmpi_command(
    counted: Counted, placements: Placements, added: Mapping[str, str], names: Sequence[str], where: Where, request: Request
) -> list[str]:
    words: list[str] = []
    for (program, ranks), placement in zip(counted, placements, strict=True):
        words += [*([":"] if words else []), "-n", str(ranks)]
        if placement is not None:
            words += ["--host", ",".join(f"{host}:{count}" for host, count in placement)]
        elif program.per_node is not None and where.several_hosts:
            if request.map_by is not None:
                raise LaunchError(f"--map-by {request.map_by} and --nproc-per-node both place the ranks; give one of them")
            words += ["--map-by", f"ppr:{program.per_node}:node"]
        for name in names:
            words += ["-x", name]
        words += program.words(request)
    return words


def hydra_command(
    counted: Counted, placements: Placements, added: Mapping[str, str], names: Sequence[str], where: Where, request: Request
) -> list[str]:
    words: list[str] = []
    placed = [item for placement in placements for item in placement or ()]
    if placed:
        words += ["-hosts", ",".join(f"{host}:{count}" for host, count in _adjacent(placed))]
    elif counted[0][0].per_node is not None and where.several_hosts:
        words += ["-ppn", str(counted[0][0].per_node)]
    if where.several_hosts:
        # Hydra passes on its environment by default. These variables must arrive whatever the default of the site is.
        for name in sorted(set(names) & set(added)):
            words += ["-genv", name, added[name]]
    for i, (program, ranks) in enumerate(counted):
        words += [*([":"] if i else []), "-n", str(ranks), *program.words(request)]
    return words


def _adjacent(placed: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The hosts in rank order, each once. Raises LaunchError if ranks return to a host, which Hydra cannot express."""
    hosts: list[tuple[str, int]] = []
    for host, count in placed:
        if hosts and hosts[-1][0] == host:
            hosts[-1] = (host, hosts[-1][1] + count)
        elif any(host == other for other, _ in hosts):
            raise LaunchError(
                f"MPICH's mpiexec cannot return to host {host} after another host; put the programs that run on {host}"
                " next to each other"
            )
        else:
            hosts.append((host, count))
    return hosts
