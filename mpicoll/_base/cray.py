"""GPU memory with the MPI of Cray (HPE): a library beside libmpi, the GTL, which an mpi4py of PyPI is not linked with.

Modules of Cray's GPU sites set MPICH_GPU_SUPPORT_ENABLED=1. Without the GTL, MPI_Init then ends the process, even if no rank has
a GPU: "MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked". So `load` loads the GTL before libmpi
is loaded. Where there is none, `settle` takes the request back before MPI starts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from mpicoll._base import log

REQUEST = "MPICH_GPU_SUPPORT_ENABLED"
NAMES = {"nvidia": "libmpi_gtl_cuda.so", "amd": "libmpi_gtl_hsa.so"}  # by how CRAY_ACCEL_TARGET begins
SYSTEM = "/opt/cray/pe/lib64"
_loaded: list[str] = []


def requested(environ: Mapping[str, str]) -> bool:
    return environ.get(REQUEST, "0") not in ("", "0")


def find(environ: Mapping[str, str]) -> str | None:
    """The GTL that can be loaded; it stays loaded. None: there is none. Looks for that of CRAY_ACCEL_TARGET first."""
    target, root = environ.get("CRAY_ACCEL_TARGET", ""), environ.get("CRAY_MPICH_ROOTDIR", "")
    folders = [f"{root}/gtl/lib/"] * bool(root) + ["", f"{SYSTEM}/"]
    for name in sorted(NAMES, key=lambda name: not target.startswith(name)):
        for file in [f"{folder}{NAMES[name]}{ending}" for folder in folders for ending in ("", ".0")]:
            with suppress(OSError):  # missing, or the runtime of another kind of GPU is
                ctypes.CDLL(file, ctypes.RTLD_GLOBAL)
                return file
    return None


def load(environ: Mapping[str, str]) -> None:
    """Loads the GTL if the environment asks for GPU support. Called before libmpi is loaded."""
    if requested(environ) and (file := find(environ)) is not None:
        _loaded[:] = [file]


def settle(environ: MutableMapping[str, str], version: str, rank: int) -> None:
    """Takes the request back where MPI would end the process. Rank 0 says what was done. ``version``: of the library."""
    if not requested(environ) or "CRAY" not in version.upper():
        return
    if _loaded:
        done = f"{_loaded[0]} is loaded"
    elif "libmpi_gtl_" in Path("/proc/self/maps").read_text():
        return
    else:
        environ[REQUEST] = "0"
        done = f"neither {' nor '.join(NAMES.values())} can be loaded, so it is 0 in this job, and MPI gets no GPU memory"
    if rank == 0:
        log.say(f"{REQUEST}=1: {done}")


def advice(environ: MutableMapping[str, str]) -> tuple[str, str] | None:
    """For the doctor: what a rank will do, and the remedy; None: nothing. Prepares ``environ`` for processes that start MPI."""
    if not requested(environ):
        return None
    if (file := find(environ)) is None:
        environ[REQUEST], said = "0", f"{REQUEST}=1, and no GTL library can be loaded: mpicoll sets it to 0"
        return said, f"CPUs: unset {REQUEST}; GPUs: module load craype-accel-..."
    environ["LD_PRELOAD"] = " ".join(filter(None, (file, environ.get("LD_PRELOAD"))))
    return f"{REQUEST}=1: mpicoll loads {file} before MPI", f"programs that start MPI before mpicoll need LD_PRELOAD={file}"
