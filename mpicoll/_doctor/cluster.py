"""The doctor's look at the cluster: the scheduler, and the network between nodes against what this MPI can use.

Each look is two functions: one records facts (environment, files, what a tool prints), the other, which is pure, makes
`Finding`s of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpicoll._discovery import find
from mpicoll._discovery.ask import output_of
from mpicoll._discovery.detect import without_job
from mpicoll._discovery.find import Mpi
from mpicoll._discovery.slurm import allocated_nodes
from mpicoll._doctor.cuda import Finding
from mpicoll.errors import LaunchError

TOOL_TIMEOUT_S = 20.0  # of srun --mpi=list and ompi_info; usual is 1 s

# --- the scheduler ----------------------------------------------------------------------------------------------------

# Name, the variable that holds the job's number, the variable that names a file of hosts (or ""), and what to do on several
# nodes: mpicoll.run reads Slurm's allocation by itself.
SCHEDULERS = (
    ("Slurm", "SLURM_JOB_ID", "", ""),
    ("PBS", "PBS_JOBID", "PBS_NODEFILE", "python -m mpicoll.run --hostfile $PBS_NODEFILE ..."),
    ("LSF", "LSB_JOBID", "LSB_DJOB_HOSTFILE", "python -m mpicoll.run --hostfile $LSB_DJOB_HOSTFILE ..."),
    ("Flux", "FLUX_JOB_ID", "", "flux run -n N python script.py starts ranks on all nodes"),
    (
        "Grid Engine", "PE_HOSTFILE", "PE_HOSTFILE",
        "awk '{print $1\":\"$2}' $PE_HOSTFILE > hosts; python -m mpicoll.run --hostfile hosts ...",
    ),
)  # fmt: skip


def srun_types(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """The types that ``srun --mpi`` knows; None: there is no srun, or it does not answer."""
    path = find.in_path("srun", environ)
    if path is None:
        return None
    said = output_of([str(path), "--mpi=list"], without_job(environ), TOOL_TIMEOUT_S)
    return None if said is None else read_srun_types(said)


def read_srun_types(text: str) -> tuple[str, ...] | None:
    """``none``, ``pmi2``, ``pmix`` ... in what ``srun --mpi=list`` prints, in any of its versions; None: it is none of them."""
    found: list[str] = re.findall(r"\b(none|openmpi|cray_shasta|pmi2|pmix(?:_v\d+)?)\b", text)
    return tuple(dict.fromkeys(found)) or None


def check_scheduler(environ: Mapping[str, str], mpi: Mpi | None, types: tuple[str, ...] | None) -> list[Finding]:
    """The scheduler whose job this is. types: of srun, see `srun_types`."""
    findings = []
    for name, variable, file, remedy in SCHEDULERS:
        if variable in environ:
            hosts = [host for host, _ in allocated_nodes(environ)] if name == "Slurm" else hosts_of(environ.get(file, ""))
            findings.append(_job(name, environ[variable], hosts, remedy))
    if types is not None:
        findings.append(_srun(mpi, types))
    return findings


def hosts_of(path: str) -> list[str]:
    """The hosts in a scheduler's file, which begins each line with one; none where there is no such file."""
    try:
        lines = Path(path).read_text().splitlines() if path else []
    except OSError:
        return []
    return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))


def _job(scheduler: str, job: str, hosts: list[str], remedy: str) -> Finding:
    number = "" if "/" in job else f" {job}"
    where = f" on {len(hosts)} node{'s' * (len(hosts) > 1)}: {', '.join(hosts[:4])}{', ...' * (len(hosts) > 4)}" if hosts else ""
    text = f"{scheduler} job{number}{where}"
    if not remedy:
        return Finding("ok", "scheduler", f"{text}; mpicoll.run reads its nodes")
    if len(hosts) == 1:
        return Finding("ok", "scheduler", text)
    return Finding("note", "scheduler", f"{text}; mpicoll.run does not read its nodes", remedy=remedy)


def _srun(mpi: Mpi | None, types: tuple[str, ...]) -> Finding:
    listed = f"srun --mpi offers {', '.join(types)}"
    if mpi is None:
        return Finding("ok", "srun", listed)
    wanted = "pmix" if mpi.family == "openmpi" else "pmi2"
    fitting = [name for name in types if name.startswith(wanted) or (name == "cray_shasta" and wanted == "pmi2")]
    if fitting:
        return Finding("ok", "srun", f"{listed}; {mpi.vendor} starts by srun --mpi={fitting[0]}")
    return Finding(
        "note", "srun", f"{listed}; {mpi.vendor} needs {wanted}: under srun each rank would be alone",
        remedy="start with `python -m mpicoll.run` inside the allocation",
    )  # fmt: skip


# --- the network between nodes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fabric:
    """A network that MPI should use instead of TCP: its devices on this node, and the transports that drive it."""

    name: str
    devices: tuple[str, ...]
    transports: tuple[str, ...]


TRANSPORTS = {  # any one of them drives the fabric
    "InfiniBand": ("UCX", "OFI", "openib", "MVAPICH"),
    "Omni-Path": ("PSM2", "OFI", "MVAPICH"),
    "Slingshot": ("OFI",),
    "EFA": ("OFI",),
}
OPENMPI_COMPONENTS = {"pml:ucx": "UCX", "mtl:ofi": "OFI", "mtl:psm2": "PSM2", "btl:openib": "openib"}


def fabrics(sysfs: Path = Path("/sys/class")) -> list[Fabric]:
    """The fabrics whose devices are on this node and up. Ethernet, RoCE included, is not among them: TCP runs there too."""
    found: dict[str, list[str]] = {}
    for device in _entries(sysfs / "infiniband"):
        name = _kind(device)
        if name is not None:
            found.setdefault(name, []).append(device.name)
    slingshot = [device.name for device in _entries(sysfs / "cxi")]
    if slingshot:
        found["Slingshot"] = slingshot
    return [Fabric(name, tuple(devices), TRANSPORTS[name]) for name, devices in found.items()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _kind(device: Path) -> str | None:
    """The fabric of a device in /sys/class/infiniband; None: Ethernet, or no port of it is up."""
    ports = _entries(device / "ports")
    states = [_text(port / "state") for port in ports]
    if ports and not any("ACTIVE" in state for state in states):
        return None
    if device.name.startswith("hfi1"):
        return "Omni-Path"
    if "efa" in os.path.basename(os.path.realpath(device / "device" / "driver")) or device.name.startswith("efa"):
        return "EFA"
    return "InfiniBand" if any(_text(port / "link_layer") == "InfiniBand" for port in ports) else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def transports(mpi: Mpi, library_version: str, components: str | None) -> tuple[str, ...] | None:
    """The transports that an MPI has beside TCP and shared memory; None: it does not say.

    Args:
        library_version: What MPI_Get_library_version gives; MPICH names its device there.
        components: What ``ompi_info --parsable`` prints, for Open MPI; None: it is not there.
    """
    if mpi.family == "openmpi":
        if components is None:
            return None
        named = re.findall(r"^mca:(\w+:\w+):", components, re.MULTILINE)
        found = {OPENMPI_COMPONENTS[name] for name in named if name in OPENMPI_COMPONENTS}
        return tuple(sorted(found))
    if "MVAPICH" in library_version.upper():
        return ("MVAPICH",)
    if mpi.vendor.startswith("Intel"):
        return ("OFI",)
    device = re.search(r"\bch[34]:([\w ,:]+)", library_version)
    if device is None:
        return None
    return tuple(name for name in ("OFI", "UCX") if name.lower() in device[1].lower())


def ompi_components(mpi: Mpi, environ: Mapping[str, str]) -> str | None:
    """What the ``ompi_info --parsable`` beside an Open MPI prints; None: it is not there, or does not run."""
    if mpi.family != "openmpi":
        return None
    try:
        mpiexec = find.find_mpiexec(mpi, environ)
    except LaunchError:
        return None
    command = [str(Path(mpiexec.path).parent / "ompi_info"), "--parsable"]
    said = output_of(command, {**without_job(environ), **mpiexec.environ}, TOOL_TIMEOUT_S)
    return said if said is not None and "mca:" in said else None


def check_fabric(
    found: list[Fabric], mpi: Mpi, usable: tuple[str, ...] | None, verbs: bool = True, wheels: tuple[str, ...] = ()
) -> list[Finding]:
    """Whether this MPI drives the fabrics of this node.

    Args:
        usable: See `transports`.
        verbs: Whether /dev/infiniband is there, which InfiniBand and EFA need.
        wheels: The packages of this Python environment that bring an MPI.
    """
    if not found:
        return [Finding("ok", "network", "no InfiniBand, Omni-Path, Slingshot or EFA device here; between nodes, MPI uses TCP")]
    return [_one_fabric(fabric, mpi, usable, verbs, wheels) for fabric in found]


def _one_fabric(fabric: Fabric, mpi: Mpi, usable: tuple[str, ...] | None, verbs: bool, wheels: tuple[str, ...]) -> Finding:
    device = f"{fabric.name} ({', '.join(fabric.devices)})"
    if not verbs and fabric.name in ("InfiniBand", "EFA"):
        return Finding(
            "note", "network", f"{device} is here, but not /dev/infiniband: MPI will use TCP between nodes",
            remedy="hand the devices to the container (docker --device=/dev/infiniband --ulimit memlock=-1)",
        )  # fmt: skip
    needed = " or ".join(fabric.transports)
    if usable is None:
        text = f"{device} is here; whether {mpi.vendor} can use it is not known: it needs {needed}"
        return Finding(
            "note", "network", text, remedy="compare `python -m mpicoll.bench latency` between two nodes with TCP's 20 us"
        )
    fitting = [name for name in usable if name in fabric.transports]
    if fitting:
        return Finding("ok", "network", f"{device}; {mpi.vendor} drives it by {', '.join(fitting)}")
    has = f"has {', '.join(usable)}" if usable else "has TCP only"
    remedy = "load the site's MPI (`module load openmpi`, say)"
    if wheels:
        remedy += f" and `pip uninstall {' '.join(wheels)}`, which mpi4py finds first"
    text = f"{device} is here, but {mpi.vendor} cannot use it: it {has}, and needs {needed}; expect TCP's speed between nodes"
    return Finding("note", "network", text, remedy=remedy)
