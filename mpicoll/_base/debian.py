"""MPICH of Debian and Ubuntu: the wheels of mpi4py need it under the name libmpi.so.12, and its name is libmpich.so.12."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from glob import glob
from pathlib import Path

INSTALLED = "/usr/lib/*/libmpich.so.12"


def advice(environ: Mapping[str, str], pattern: str = INSTALLED) -> str:
    """How mpi4py loads this library, for a message that it has not loaded any; empty if the library is not here.

    An mpi4py wheel is linked with libmpi.so.12. The dynamic linker finds a link of that name in LD_LIBRARY_PATH, which it reads
    when a process starts; the setting of mpi4py alone does not help.
    """
    library = environ.get("MPI4PY_LIBMPI") or next(iter(sorted(glob(pattern))), "")
    if not Path(library).name.startswith("libmpich.") or not Path(library).exists():
        return ""
    folder = f"{sys.prefix}/lib/mpich"
    return (
        f"\n{library}, MPICH of Debian and Ubuntu, works under another name:\n"
        f"    mkdir -p {folder} && ln -sf {library} {folder}/libmpi.so.12\n"
        f"    export LD_LIBRARY_PATH={folder}:$LD_LIBRARY_PATH MPI4PY_LIBMPI={folder}/libmpi.so.12"
    )
