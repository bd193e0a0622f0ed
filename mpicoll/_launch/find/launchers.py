"""The launchers that are no mpiexec: srun, and the command line in MPICOLL_LAUNCHER_COMMAND.

srun starts ranks of Open MPI by --mpi=pmix, and those of MPICH and its children by --mpi=pmi2 or cray_shasta.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from mpicoll._base.errors import LaunchError
from mpicoll._base.launcher import without_job
from mpicoll._launch.find.ask import output_of
from mpicoll._launch.find.installations import Mpi, Mpiexec, in_path

TEMPLATE = "MPICOLL_LAUNCHER_COMMAND"
LAUNCHERS = {"srun": "--launcher srun", "template": TEMPLATE}  # family of `Mpiexec` -> how the user chooses it
SRUN_TIMEOUT_S = 20.0  # of srun --mpi=list; usual is 1 s


def srun_types(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The types of ``srun --mpi``; None: there is no srun, or it does not answer."""
    path = in_path("srun", environ)
    if path is None:
        return None
    said = output_of([str(path), "--mpi=list"], without_job(environ), SRUN_TIMEOUT_S)
    return None if said is None else read_srun_types(said)


def read_srun_types(text: str) -> tuple[str, ...] | None:
    """The types in the output of ``srun --mpi=list`` of any version: ``none``, ``pmi2``, ``pmix`` ...; None: no type in it."""
    types: list[str] = re.findall(r"\b(none|openmpi|cray_shasta|pmi2|pmix(?:_v\d+)?)\b", text)
    return tuple(dict.fromkeys(types)) or None


def srun_type(mpi: Mpi, types: tuple[str, ...]) -> str | None:
    """The type of ``srun --mpi`` that starts ``mpi``; None: this Slurm has none."""
    wanted = ("pmix",) if mpi.family == "openmpi" else ("pmi2", "cray_shasta")
    return next((name for start in wanted for name in types if name.startswith(start)), None)


def find_srun(mpi: Mpi, environ: Mapping[str, str]) -> Mpiexec:
    """srun, for ranks of ``mpi``.

    Raises:
        LaunchError: It is not installed, or it cannot start ranks of this MPI; the message names the remedy.
    """
    path = in_path("srun", environ)
    if path is None:
        raise LaunchError("--launcher srun: no srun in PATH; load its module, or use --launcher mpiexec")
    types = srun_types(environ) or ()
    pmi = srun_type(mpi, types)
    if pmi is None:
        raise LaunchError(
            f"--launcher srun: {mpi.vendor} needs --mpi={'pmix' if mpi.family == 'openmpi' else 'pmi2'}, and this srun offers"
            f" {', '.join(types) or 'nothing'}: each rank would be alone; use --launcher mpiexec"
        )
    return Mpiexec(str(path), "srun", (), pmi=pmi)


def find_template(text: str, environ: Mapping[str, str]) -> Mpiexec:
    """The launcher of the template ``text``. Raises LaunchError if it is not installed; the message names the remedy."""
    try:
        program, *words = shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{TEMPLATE}={text}: {error}; quote it as in a shell") from None
    path = in_path(program, environ)
    if path is None:
        raise LaunchError(f"{TEMPLATE}={text}: no {program} in PATH; load its module, or correct the command")
    return Mpiexec(str(path), "template", (), template=tuple(words))
