"""The command line of a planned job for the launcher of a scheduler. Pure. They pass on the whole environment.

    option               srun                         pals                 flux run                      jsrun
    -n N                 -n N                         -n N                 -n N (*)                      (**)
    K ranks on a node    --ntasks-per-node=K          --ppn K              -N n --tasks-per-node=K -x    --tasks_per_rs K
    --host a,b           --nodelist=a,b -N 2          --hosts a,b          --requires=host:a,b -N 2      refused
    --nnodes n           -N n                         --hosts a,b          -N n                          --nrs n
    --bind-to core       --cpu-bind=cores             --cpu-bind core      -o cpu-affinity=per-task      refused
    no --bind-to         --cpu-bind=none (***)        --cpu-bind none      -o cpu-affinity=on            --bind none
    --tag-output         --label                      --label              --label-io                    --stdio_mode prepended
    a rank fails         --kill-on-bad-exit=1         its default          -o exit-on-error              -X 1
    several programs     refused                      `:`                  refused                       refused

(*) Flux gives such a rank one core. Where every node gets equally many ranks, they share all cores of their nodes instead.
(**) One resource set is a whole node, so every node gets equally many ranks.
(***) With SLURM_CPUS_PER_TASK set: --cpus-per-task, which srun no longer takes from sbatch (22.05), and Slurm's own binding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mpicoll._launch.job import Placement, Program, Request
from mpicoll.errors import LaunchError

SRUN_UNITS = {
    "none": "none", "core": "cores", "socket": "sockets", "package": "sockets", "numa": "ldoms", "hwthread": "threads",
}  # fmt: skip
PALS_UNITS = {
    "none": "none", "core": "core", "socket": "socket", "package": "socket", "numa": "numa", "hwthread": "thread",
}  # fmt: skip
FLUX_UNITS = {"none": "on", "core": "per-task"}
JSRUN_UNITS = {"none": "none"}


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
    launcher: str,
    pmi: str,
    counted: Sequence[tuple[Program, int]],
    layout: Layout,
    request: Request,
    environ: Mapping[str, str],
    extra: Sequence[str] = (),
) -> list[str]:
    """The words after the path of ``launcher``.

    Args:
        pmi: The interface for the MPI, as `Mpiexec` has it.
        extra: Words of the user; they override those of mpicoll.

    Raises:
        LaunchError: This launcher cannot do that; the message names the option.
    """
    if request.fault_tolerant:
        raise LaunchError(
            f"--fault-tolerant: under {launcher} a job ends when a rank dies; use --launcher mpiexec and Open MPI 5"
        )
    if request.map_by is not None:
        raise LaunchError(f"--map-by {request.map_by}: give {launcher} its own option for that by --mpiexec-args")
    if len(counted) > 1 and (launcher != "pals" or layout.hosts):
        raise LaunchError(f"several programs: --launcher {launcher} cannot place them; use --launcher mpiexec")
    words = [*WORDS[launcher](pmi, counted[0][1], layout, request, environ), *extra]
    for i, (program, ranks) in enumerate(counted):
        words += [":", "-n", str(ranks)] if i else []
        words += program.words(launcher, request)
    return words


def _bound(request: Request, units: Mapping[str, str], launcher: str) -> str | None:
    if request.bind_to is None:
        return None
    if request.bind_to not in units:
        raise LaunchError(f"--bind-to {request.bind_to}: --launcher {launcher} takes {', '.join(units)}")
    return units[request.bind_to]


def srun_words(pmi: str, ranks: int, layout: Layout, request: Request, environ: Mapping[str, str]) -> list[str]:
    # --export: sbatch --export=NONE would else hide the variables from the ranks
    words = [f"--mpi={pmi}", "--kill-on-bad-exit=1", "--export=ALL", "-n", str(ranks)]
    words += ["-N", str(layout.nodes)] if layout.nodes is not None and (layout.even or layout.hosts) else []
    words += [f"--nodelist={','.join(layout.hosts)}"] if layout.hosts else []
    words += [f"--ntasks-per-node={layout.per_node}"] if layout.per_node is not None and layout.even else []
    cpus = environ.get("SLURM_CPUS_PER_TASK", "")
    words += [f"--cpus-per-task={cpus}"] if cpus.isdigit() else []
    binding = _bound(request, SRUN_UNITS, "srun") or (None if cpus.isdigit() else "none")
    words += [f"--cpu-bind={binding}"] if binding else []
    return [*words, *(["--label"] if request.tag_output else [])]


def pals_words(pmi: str, ranks: int, layout: Layout, request: Request, environ: Mapping[str, str]) -> list[str]:
    words = ["--pmi", pmi] if pmi else []
    words += ["--hosts", ",".join(layout.hosts)] if layout.hosts else []
    words += ["--ppn", str(layout.per_node)] if layout.per_node is not None else []
    binding = _bound(request, PALS_UNITS, "pals") or (None if "PALS_CPU_BIND" in environ else "none")
    words += ["--cpu-bind", binding] if binding else []
    return [*words, *(["--label"] if request.tag_output else []), "-n", str(ranks)]


def flux_words(pmi: str, ranks: int, layout: Layout, request: Request, environ: Mapping[str, str]) -> list[str]:
    words = ["run", "-o", "exit-on-error", *(["-o", f"pmi={pmi}"] if pmi else [])]
    words += [f"--requires=host:{','.join(layout.hosts)}"] if layout.hosts else []
    if layout.nodes is not None and layout.even:
        words += ["-N", str(layout.nodes), f"--tasks-per-node={layout.per_node}", "--exclusive"]
    else:
        words += ["-n", str(ranks)]
    words += ["-o", f"cpu-affinity={_bound(request, FLUX_UNITS, 'flux') or 'on'}"]
    return [*words, *(["--label-io"] if request.tag_output else [])]


def jsrun_words(pmi: str, ranks: int, layout: Layout, request: Request, environ: Mapping[str, str]) -> list[str]:
    if layout.hosts:
        raise LaunchError(f"--host {','.join(layout.hosts)}: jsrun takes the nodes of the job; use --nnodes and --nproc-per-node")
    if layout.nodes is None or not layout.even:
        raise LaunchError(f"{ranks} ranks: jsrun starts equally many on every node; give --nnodes and --nproc-per-node in a job")
    words = ["--nrs", str(layout.nodes), "--rs_per_host", "1", "--tasks_per_rs", str(layout.per_node)]
    words += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--bind", _bound(request, JSRUN_UNITS, "jsrun") or "none"]
    return [*words, "-X", "1", *(["--stdio_mode", "prepended"] if request.tag_output else [])]


WORDS: dict[str, Callable[[str, int, Layout, Request, Mapping[str, str]], list[str]]] = {
    "srun": srun_words,
    "pals": pals_words,
    "flux": flux_words,
    "jsrun": jsrun_words,
}
