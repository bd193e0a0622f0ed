"""The command line of a planned job, for each kind of mpiexec. Pure.

    option                Open MPI 5             Open MPI 4              Hydra (MPICH)
    --bind-to UNIT        --bind-to UNIT         --bind-to UNIT          -bind-to UNIT
    --map-by UNIT         --map-by UNIT          --map-by UNIT           -map-by UNIT
    --tag-output          --output tag           --tag-output            -prepend-rank
    --log-dir DIR         mpicoll._launch.rank   mpicoll._launch.rank    mpicoll._launch.rank
    --fault-tolerant      --with-ft ulfm         refused                 refused

# Note [Log files]
The options of mpiexec for output files differ: Open MPI 5.0.11 loses standard error with --output dir=DIR and names files after
its process with --output file=NAME, Open MPI 4 makes a folder for each job, and Hydra needs the folder on every host
beforehand. Therefore each rank redirects its own output before the program starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mpicoll._base.errors import LaunchError
from mpicoll._launch.job import Job, Request


def command(job: Job, added: Mapping[str, str], names: Sequence[str]) -> tuple[str, ...]:
    """The command.

    Args:
        added: To the environment.
        names: Variables that other hosts get.

    Raises:
        LaunchError: This mpiexec does not have an option; the message names the remedy.
    """
    if job.mpi.vendor == "Intel MPI" and (job.request.bind_to is not None or job.request.map_by is not None):
        raise LaunchError("--bind-to and --map-by: Intel MPI binds by its own variables; set I_MPI_PIN_DOMAIN=core, or auto")
    openmpi = job.mpi.vendor == "Open MPI" and job.mpi.version[:1] >= (5,) and job.mpiexec.family == "openmpi"
    if job.request.fault_tolerant and not openmpi:
        raise LaunchError(
            f"--fault-tolerant: {job.mpi.vendor} {'.'.join(map(str, job.mpi.version))} ends the job when a rank dies; Open MPI 5"
            " can go on (--mpi openmpi). With every MPI, programs can save checkpoints and start again"
        )
    words = _openmpi_words(job, names) if job.mpiexec.family == "openmpi" else _hydra_words(job, added, names)
    return (job.mpiexec.path, *job.request.mpiexec_args, *words)


# --- mpiexec ----------------------------------------------------------------------------------------------------------


def _openmpi_words(job: Job, names: Sequence[str]) -> list[str]:
    request, prrte = job.request, job.mpiexec.version[:1] >= (5,)
    words = _binding(request, "--")
    if request.tag_output:
        words += ["--output", "tag"] if prrte else ["--tag-output"]
    words += ["--with-ft", "ulfm"] if request.fault_tolerant else []
    begin = 0
    for program, ranks in zip(job.programs, job.counts, strict=True):
        words += [*([":"] if begin else []), "-n", str(ranks)]
        if job.places is not None:
            words += ["--host", _spelled(job.places[begin : begin + ranks])]
        elif request.per_node is not None and job.where.several_hosts:
            if request.map_by is not None:
                raise LaunchError(f"--map-by {request.map_by} and --nproc-per-node both place the ranks; give one of them")
            words += ["--map-by", f"ppr:{request.per_node}:node"]
        for name in names:
            words += ["-x", name]
        words += program.command
        begin += ranks
    return words


def _binding(request: Request, dashes: str) -> list[str]:
    """The units are those of this mpiexec, which refuses others."""
    words = [] if request.map_by is None else [dashes + "map-by", request.map_by]
    return words if request.bind_to is None else [*words, dashes + "bind-to", request.bind_to]


def _hydra_words(job: Job, added: Mapping[str, str], names: Sequence[str]) -> list[str]:
    words = _binding(job.request, "-") + (["-prepend-rank"] if job.request.tag_output else [])
    if job.places is not None:
        words += ["-hosts", _spelled(job.places)]
    elif job.request.per_node is not None and job.where.several_hosts:
        words += ["-ppn", str(job.request.per_node)]
    if job.where.several_hosts:
        # Hydra passes on its environment by default. These variables must arrive whatever the default of the site is.
        for name in sorted(set(names) & set(added)):
            words += ["-genv", name, added[name]]
    for i, (program, ranks) in enumerate(zip(job.programs, job.counts, strict=True)):
        words += [*([":"] if i else []), "-n", str(ranks), *program.command]
    return words


def _spelled(places: Sequence[str]) -> str:
    return ",".join(f"{host}:{count}" for host, count in Counter(places).items())
