"""The launchers of schedulers, which start ranks without an mpiexec of the MPI.

launcher   program              interface of Open MPI      interface of MPICH and its children
srun       srun                 --mpi=pmix                 --mpi=pmi2, or cray_shasta
pals       mpiexec of HPE       --pmi pmix                 the default of the site
flux       flux run             -o pmi=pmix (flux-pmix)    the default (PMI-1)
jsrun      jsrun                PMIx, always               none
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from mpicoll._discovery.ask import output_of
from mpicoll._discovery.detect import without_job
from mpicoll._discovery.find import Mpi, Mpiexec, in_path
from mpicoll.errors import LaunchError

LAUNCHERS = ("srun", "pals", "flux", "jsrun")
SCHEDULERS = {"srun": "SLURM_JOB_ID", "flux": "FLUX_URI", "jsrun": "LSB_JOBID", "pals": "PBS_JOBID"}  # set in a job of each
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


def find_launcher(name: str, mpi: Mpi, environ: Mapping[str, str]) -> Mpiexec:
    """The launcher ``name`` of `LAUNCHERS`, for ranks of ``mpi``.

    Raises:
        LaunchError: It is not installed, or it cannot start ranks of this MPI; the message names the remedy.
    """
    path = in_path("mpiexec" if name == "pals" else name, environ)
    if path is None:
        raise LaunchError(f"--launcher {name}: no {path_name(name)} in PATH; load its module, or use --launcher mpiexec")
    pmi = "pmix" if mpi.family == "openmpi" and name != "jsrun" else ""
    if name == "srun":
        types = srun_types(environ) or ()
        pmi = srun_type(mpi, types) or ""
        if not pmi:
            raise LaunchError(
                f"--launcher srun: {mpi.vendor} needs --mpi={'pmix' if mpi.family == 'openmpi' else 'pmi2'}, and this srun offers"
                f" {', '.join(types) or 'nothing'}: each rank would be alone; use --launcher mpiexec"
            )
    if name == "pals" and not is_pals(path):
        raise LaunchError(f"--launcher pals: {path} is no mpiexec of PALS (HPE); put that one first in PATH")
    if name == "jsrun" and mpi.family != "openmpi":
        raise LaunchError(f"--launcher jsrun: it starts ranks of Spectrum MPI and Open MPI by PMIx, and this is {mpi.vendor}")
    return Mpiexec(str(path), name, (), pmi=pmi)


def path_name(launcher: str) -> str:
    return "mpiexec of PALS" if launcher == "pals" else launcher


def is_pals(path: Path) -> bool:
    """Whether this mpiexec is that of PALS, which HPE installs in /opt/cray/pe/pals or /opt/cray/pals."""
    return "pals" in Path(os.path.realpath(path)).parts


def find_other(mpi: Mpi, environ: Mapping[str, str]) -> Mpiexec | None:
    """The launcher of the scheduler of this job, for an MPI without an mpiexec; None: there is none that can start its ranks."""
    for name, variable in SCHEDULERS.items():
        if variable in environ:
            try:
                return find_launcher(name, mpi, environ)
            except LaunchError:
                continue  # the error about mpiexec names the remedy
    return None
