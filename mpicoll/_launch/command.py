"""The command line of a planned job, for each launcher. Pure.

    option                Open MPI 5             Open MPI 4              Hydra (MPICH)
    --bind-to socket      --bind-to package      --bind-to socket        -bind-to socket
    --map-by numa         --map-by numa          --map-by numa           -map-by numa -bind-to numa
    --tag-output          --output tag           --tag-output            -prepend-rank
    --log-dir DIR         mpicoll._launch.rank   mpicoll._launch.rank    mpicoll._launch.rank
    --fault-tolerant      --with-ft ulfm         refused                 refused

    option                srun                         MPICOLL_LAUNCHER_COMMAND
    -n N                  -n N                         {ranks}
    K ranks on a node     --ntasks-per-node=K          {per_node}
    --nnodes n            -N n                         {nodes}
    --host a,b            --nodelist=a,b -N 2          {hosts}
    --bind-to core        --cpu-bind=cores             refused
    no --bind-to          --cpu-bind=none (*)          as the user has written it
    --tag-output          --label                      refused
    a rank fails          --kill-on-bad-exit=1         as the user has written it
    --map-by              refused                      refused
    several programs      refused                      refused

(*) With SLURM_CPUS_PER_TASK set: --cpus-per-task, which srun no longer takes from sbatch (22.05), and Slurm's own binding.
Both of these launchers must pass on the whole environment.

# Note [Log files]
The options of mpiexec for output files differ: Open MPI 5.0.11 loses standard error with --output dir=DIR and names files after
its process with --output file=NAME, Open MPI 4 makes a folder for each job, and Hydra needs the folder on every host
beforehand. Therefore each rank redirects its own output before the program starts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpicoll._base.errors import LaunchError
from mpicoll._base.slurm import cpus_per_task
from mpicoll._launch.find.installations import LAUNCHERS, TEMPLATE
from mpicoll._launch.job import Job, Program, Request

OPENMPI_UNITS = ("none", "hwthread", "core", "l1cache", "l2cache", "l3cache", "numa", "package", "socket")
HYDRA_UNITS = re.compile(
    r"(machine|numa|socket|core|hwthread|l[1-5][diu]?cache|gpu|ib|en|eth|hfi|hsn)\d*(:\d+)?|pci:.+"
)  # with a number: that many units for each rank
SRUN_UNITS = {
    "none": "none", "core": "cores", "socket": "sockets", "package": "sockets", "numa": "ldoms", "hwthread": "threads",
}  # fmt: skip
FIELDS = {  # of a template, and the option that makes each known
    "ranks": "-n N",
    "per_node": "--nproc-per-node K",
    "nodes": "--nnodes N",
    "hosts": "--host A,B or --hostfile FILE",
}


def command(job: Job, added: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    """The command.

    Args:
        added: To the environment.
        names: Variables that other hosts get.

    Raises:
        LaunchError: This launcher does not have an option; the message names the remedy.
    """
    if job.mpiexec.family in LAUNCHERS:
        return (job.mpiexec.path, *_launcher_words(job))
    if job.mpi.vendor == "Intel MPI" and (job.request.bind_to is not None or job.request.map_by is not None):
        raise LaunchError("--bind-to and --map-by: Intel MPI binds by its own variables; set I_MPI_PIN_DOMAIN=core, or auto")
    openmpi = job.mpi.vendor == "Open MPI" and job.mpi.version[:1] >= (5,) and job.mpiexec.family == "openmpi"
    if job.request.fault_tolerant and not openmpi:
        raise LaunchError(
            f"--fault-tolerant: {job.mpi.vendor} {'.'.join(map(str, job.mpi.version))} ends the job when a rank dies; Open MPI 5"
            " can go on (--mpi openmpi). With every MPI, programs can save checkpoints and start again"
        )
    words = _openmpi_words(job, names) if job.mpiexec.family == "openmpi" else _hydra_words(job, added, names)
    return (job.mpiexec.path, *job.request.extra_words(), *words)


# --- mpiexec ----------------------------------------------------------------------------------------------------------


def _openmpi_words(job: Job, names: Sequence[str]) -> list[str]:
    request, prrte = job.request, job.mpiexec.version[:1] >= (5,)
    words = _openmpi_binding(request, "package" if prrte else "socket")
    if request.tag_output:
        words += ["--output", "tag"] if prrte else ["--tag-output"]
    words += ["--with-ft", "ulfm"] if request.fault_tolerant else []
    for i, ((program, ranks), placement) in enumerate(zip(job.counted, job.placements, strict=True)):
        words += [*([":"] if i else []), "-n", str(ranks)]
        if placement is not None:
            words += ["--host", _spelled(placement)]
        elif program.per_node is not None and job.where.several_hosts:
            if request.map_by is not None:
                raise LaunchError(f"--map-by {request.map_by} and --nproc-per-node both place the ranks; give one of them")
            words += ["--map-by", f"ppr:{program.per_node}:node"]
        for name in names:
            words += ["-x", name]
        words += program.words(request)
    return words


def _openmpi_binding(request: Request, package: str) -> list[str]:
    """package: the name of a socket in this version."""
    words = []
    if request.map_by is not None:
        words += ["--map-by", re.sub(r"\b(socket|package)\b", package, request.map_by)]
    if request.bind_to is not None:
        unit, colon, modifier = request.bind_to.partition(":")
        if modifier.isdigit():
            raise LaunchError(
                f"--bind-to {request.bind_to}: Open MPI binds to one {unit}; `--map-by slot:pe={modifier} --bind-to core` gives"
                f" each rank {modifier} cores"
            )
        if unit not in OPENMPI_UNITS:
            raise LaunchError(f"--bind-to {request.bind_to}: Open MPI binds to one of {', '.join(OPENMPI_UNITS)}")
        words += ["--bind-to", re.sub(r"^(socket|package)\b", package, unit) + colon + modifier]
    return words


def _hydra_words(job: Job, added: Mapping[str, str], names: Sequence[str]) -> list[str]:
    words = _hydra_binding(job.request) + (["-prepend-rank"] if job.request.tag_output else [])
    placed = [item for placement in job.placements for item in placement or ()]
    per_node = job.counted[0][0].per_node
    if placed:
        words += ["-hosts", _spelled(_adjacent(placed))]
    elif per_node is not None and job.where.several_hosts:
        words += ["-ppn", str(per_node)]
    if job.where.several_hosts:
        # Hydra passes on its environment by default. These variables must arrive whatever the default of the site is.
        for name in sorted(set(names) & set(added)):
            words += ["-genv", name, added[name]]
    for i, (program, ranks) in enumerate(job.counted):
        words += [*([":"] if i else []), "-n", str(ranks), *program.words(job.request)]
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


def _spelled(placement: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{host}:{count}" for host, count in placement)


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


# --- launchers that are no mpiexec ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where the ranks run, as far as it is known; None: the scheduler decides.

    Args:
        hosts: Named by the user; empty: the scheduler decides.
        nodes: How many.
        per_node: Ranks on each node, the most where they differ.
        even: Every node has equally many ranks.
    """

    hosts: tuple[str, ...] = ()
    nodes: int | None = None
    per_node: int | None = None
    even: bool = False


def _launcher_words(job: Job) -> list[str]:
    chosen = LAUNCHERS[job.mpiexec.family]
    if job.request.fault_tolerant:
        raise LaunchError(f"--fault-tolerant: under {chosen} a job ends when a rank dies; use --launcher mpiexec and Open MPI 5")
    if len(job.counted) > 1:
        raise LaunchError(f"several programs: {chosen} cannot place them; use --launcher mpiexec")
    ((program, ranks),) = job.counted
    layout, words = _layout(job, program, ranks), _srun_words if job.mpiexec.family == "srun" else _template_words
    return [*words(job, program, ranks, layout), *job.request.extra_words(), *program.words(job.request)]


def _layout(job: Job, program: Program, ranks: int) -> Layout:
    """Raises LaunchError if the user gives the hosts different numbers of ranks."""
    placement, allocation = job.placements[0], job.site.allocation
    if placement is not None:
        counts = [count for _, count in placement]
        if max(counts) != min(counts):
            raise LaunchError(
                f"{_spelled(placement)}: launchers other than mpiexec start equally many ranks on every host; use --launcher"
                " mpiexec"
            )
        return Layout(tuple(host for host, _ in placement), len(placement), counts[0], True)
    nodes = job.request.nodes if allocation is None else len(allocation.nodes)
    each = program.per_node if allocation is None else job.where.ranks_per_host
    if nodes is None:
        return Layout(per_node=each)
    each = each if each is not None else -(-ranks // nodes)
    return Layout((), min(nodes, -(-ranks // each)), each, ranks % each == 0)


def _srun_words(job: Job, program: Program, ranks: int, layout: Layout) -> list[str]:
    request = job.request
    if request.map_by is not None:
        raise LaunchError(f"--map-by {request.map_by}: give srun its own option for that by --mpiexec-args")
    if request.bind_to is not None and request.bind_to not in SRUN_UNITS:
        raise LaunchError(f"--bind-to {request.bind_to}: --launcher srun takes {', '.join(SRUN_UNITS)}")
    # --export: sbatch --export=NONE would else hide the variables from the ranks
    words = [f"--mpi={job.mpiexec.pmi}", "--kill-on-bad-exit=1", "--export=ALL", "-n", str(ranks)]
    words += ["-N", str(layout.nodes)] if layout.nodes is not None and (layout.even or layout.hosts) else []
    words += [f"--nodelist={','.join(layout.hosts)}"] if layout.hosts else []
    words += [f"--ntasks-per-node={layout.per_node}"] if layout.per_node is not None and layout.even else []
    cpus = cpus_per_task(job.site.environ)
    words += [f"--cpus-per-task={cpus}"] if cpus else []
    binding = SRUN_UNITS[request.bind_to] if request.bind_to is not None else (None if cpus else "none")
    words += [f"--cpu-bind={binding}"] if binding else []
    return [*words, *(["--label"] if request.tag_output else [])]


def _template_words(job: Job, program: Program, ranks: int, layout: Layout) -> list[str]:
    """The words of the template with the values of its fields.

    Raises:
        LaunchError: The template is broken, it cannot express what the user asks for, or the value of a field is not known.
    """
    named = _fields(job.mpiexec.template)
    _check_expressed(named, program, ranks, layout, job.request)
    hosts = ",".join(job.where.hosts[: layout.nodes])
    values = {"ranks": ranks, "per_node": layout.per_node, "nodes": layout.nodes, "hosts": hosts}
    for name in FIELDS:
        if name in named and not values[name]:
            raise LaunchError(
                f"{TEMPLATE}: {{{name}}} is not known here; give {FIELDS[name]}, or start inside a job of a scheduler"
            )
    return [word.format(**values) for word in job.mpiexec.template]


def _fields(template: Sequence[str]) -> set[str]:
    """The names of the fields in the template."""
    named = set()
    for word in template:
        try:
            for _, name, form, conversion in string.Formatter().parse(word):
                if name is not None:
                    named.add(name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else ""))
        except ValueError as error:
            raise LaunchError(f"{TEMPLATE}: {word}: {error}; write {{{{ and }}}} for braces that are no field") from None
    for name in sorted(named - set(FIELDS)):
        known = ", ".join(f"{{{field}}}" for field in FIELDS)
        raise LaunchError(f"{TEMPLATE}: {{{name}}} is no field; use {known}, and {{{{ and }}}} for other braces")
    return named


def _check_expressed(named: set[str], program: Program, ranks: int, layout: Layout, request: Request) -> None:
    """Raises LaunchError for an option that a template with these fields would drop."""
    for option, value in {
        "--bind-to": request.bind_to, "--map-by": request.map_by, "--tag-output": request.tag_output,
        "--oversubscribe": request.oversubscribe,
    }.items():  # fmt: skip
        if value:
            raise LaunchError(f"{option}: {TEMPLATE} cannot express it; write that launcher's own option into it")
    counted = program.per_node is not None or any(host.slots is not None for host in program.hosts or ())
    for option, asked, fields in (
        ("--host, --hostfile", program.hosts is not None, ("hosts",)),
        ("--nproc-per-node, or a number of ranks beside a host", counted, ("per_node",)),
        ("--nnodes", request.nodes is not None, ("nodes", "hosts")),
    ):
        if asked and named.isdisjoint(fields):
            raise LaunchError(f"{option}: {TEMPLATE} lacks {{{fields[0]}}}; add it, or use --launcher mpiexec")
    everywhere = layout.even and "per_node" in named and not named.isdisjoint(("nodes", "hosts"))
    if "ranks" not in named and not everywhere:
        raise LaunchError(f"{TEMPLATE} does not say how many ranks to start, here {ranks}; add {{ranks}}")
