"""The command line of a planned job for a launcher that is no mpiexec. Pure.

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

Both launchers must pass on the whole environment.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpicoll._base.errors import LaunchError
from mpicoll._launch.find.installations import Mpiexec
from mpicoll._launch.find.launchers import LAUNCHERS, TEMPLATE
from mpicoll._launch.job import Placement, Program, Request

SRUN_UNITS = {
    "none": "none", "core": "cores", "socket": "sockets", "package": "sockets", "numa": "ldoms", "hwthread": "threads",
}  # fmt: skip
FIELDS = {  # of a template, and the option that makes each known
    "ranks": "-n N",
    "per_node": "--nproc-per-node K",
    "nodes": "--nnodes N",
    "hosts": "--host A,B or --hostfile FILE",
}


@dataclass(frozen=True)
class Layout:
    """Where the ranks run, as far as it is known.

    Args:
        hosts: Named by the user; empty: the scheduler decides.
        nodes: How many; None: the scheduler decides.
        per_node: Ranks on each node, the most where they differ; None: the scheduler decides.
        even: Every node has equally many ranks.
    """

    hosts: tuple[str, ...] = ()
    nodes: int | None = None
    per_node: int | None = None
    even: bool = False


def layout_of(placement: Placement | None, ranks: int, per_node: int | None, nodes: int | None) -> Layout:
    """The layout of ``ranks`` ranks, placed by the user or spread over ``nodes`` nodes of the job.

    Raises:
        LaunchError: The user gives the hosts different numbers of ranks.
    """
    if placement is not None:
        counts = [count for _, count in placement]
        if max(counts) != min(counts):
            raise LaunchError(
                f"{','.join(f'{host}:{count}' for host, count in placement)}: launchers other than mpiexec start equally many"
                " ranks on every host; use --launcher mpiexec"
            )
        return Layout(tuple(host for host, _ in placement), len(placement), counts[0], True)
    if nodes is None:
        return Layout(per_node=per_node)
    each = per_node if per_node is not None else -(-ranks // nodes)
    return Layout((), min(nodes, -(-ranks // each)), each, ranks % each == 0)


def command(
    mpiexec: Mpiexec,
    counted: Sequence[tuple[Program, int]],
    layout: Layout,
    hosts: Sequence[str],
    request: Request,
    environ: Mapping[str, str],
    extra: Sequence[str] = (),
) -> list[str]:
    """The words after the path of the launcher.

    Args:
        hosts: On which the ranks run; empty: not known.
        extra: Words of the user; they override those of mpicoll.

    Raises:
        LaunchError: This launcher cannot do that; the message names the option.
    """
    chosen = LAUNCHERS[mpiexec.family]
    if request.fault_tolerant:
        raise LaunchError(f"--fault-tolerant: under {chosen} a job ends when a rank dies; use --launcher mpiexec and Open MPI 5")
    if len(counted) > 1:
        raise LaunchError(f"several programs: {chosen} cannot place them; use --launcher mpiexec")
    ((program, ranks),) = counted
    if mpiexec.family == "srun":
        words = srun_words(mpiexec.pmi, ranks, layout, request, environ)
    else:
        words = template_words(mpiexec.template, program, ranks, layout, hosts, request)
    return [*words, *extra, *program.words(request)]


def srun_words(pmi: str, ranks: int, layout: Layout, request: Request, environ: Mapping[str, str]) -> list[str]:
    if request.map_by is not None:
        raise LaunchError(f"--map-by {request.map_by}: give srun its own option for that by --mpiexec-args")
    if request.bind_to is not None and request.bind_to not in SRUN_UNITS:
        raise LaunchError(f"--bind-to {request.bind_to}: --launcher srun takes {', '.join(SRUN_UNITS)}")
    # --export: sbatch --export=NONE would else hide the variables from the ranks
    words = [f"--mpi={pmi}", "--kill-on-bad-exit=1", "--export=ALL", "-n", str(ranks)]
    words += ["-N", str(layout.nodes)] if layout.nodes is not None and (layout.even or layout.hosts) else []
    words += [f"--nodelist={','.join(layout.hosts)}"] if layout.hosts else []
    words += [f"--ntasks-per-node={layout.per_node}"] if layout.per_node is not None and layout.even else []
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")
    words += [f"--cpus-per-task={cpus}"] if cpus.isdigit() else []
    binding = SRUN_UNITS[request.bind_to] if request.bind_to is not None else (None if cpus.isdigit() else "none")
    words += [f"--cpu-bind={binding}"] if binding else []
    return [*words, *(["--label"] if request.tag_output else [])]


# --- MPICOLL_LAUNCHER_COMMAND -----------------------------------------------------------------------------------------


def template_words(
    template: Sequence[str], program: Program, ranks: int, layout: Layout, hosts: Sequence[str], request: Request
) -> list[str]:
    """The words of the template with the values of its fields.

    Raises:
        LaunchError: The template is broken, it cannot express what the user asks for, or the value of a field is not known.
    """
    named = _fields(template)
    _check_expressed(named, program, ranks, layout, request)
    values = {"ranks": ranks, "per_node": layout.per_node, "nodes": layout.nodes, "hosts": ",".join(hosts)}
    for name in FIELDS:
        if name in named and not values[name]:
            raise LaunchError(
                f"{TEMPLATE}: {{{name}}} is not known here; give {FIELDS[name]}, or start inside a job of a scheduler"
            )
    return [word.format(**values) for word in template]


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
