"""The doctor's checks of the cluster: the scheduler, and whether this MPI can use the network between nodes.

Each check is two functions: one collects facts (environment, files, output of a tool); the other is pure and makes `Finding`s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mpicoll._base.cpus import read
from mpicoll._base.errors import LaunchError
from mpicoll._base.launcher import without_job
from mpicoll._launch.doctor.report import Finding
from mpicoll._launch.find import installations
from mpicoll._launch.find.allocation import Allocation
from mpicoll._launch.find.ask import output_of
from mpicoll._launch.find.installations import Mpi, srun_type

TOOL_TIMEOUT_S = 20.0  # of ompi_info; usual is 1 s

# --- the scheduler ----------------------------------------------------------------------------------------------------


def check_scheduler(allocation: Allocation | None, mpi: Mpi | None, types: tuple[str, ...] | None) -> list[Finding]:
    """The scheduler of this job. types: see `installations.srun_types`."""
    findings = []
    if allocation is not None:
        hosts = [host for host, _ in allocation.nodes]
        where = f"{len(hosts)} node{'s' * (len(hosts) > 1)}: {', '.join(hosts[:4])}{', ...' * (len(hosts) > 4)}"
        findings.append(Finding("ok", "scheduler", f"{allocation} on {where}; mpicoll.run reads its nodes"))
    if types is not None:
        findings.append(_srun(mpi, types))
    return findings


def _srun(mpi: Mpi | None, types: tuple[str, ...]) -> Finding:
    listed = f"srun --mpi offers {', '.join(types)}"
    if mpi is None:
        return Finding("ok", "srun", listed)
    if (fitting := srun_type(mpi, types)) is not None:
        return Finding("ok", "srun", f"{listed}; {mpi.vendor} starts by srun --mpi={fitting}")
    needed = "pmix" if mpi.family == "openmpi" else "pmi2"
    return Finding(
        "note", "srun", f"{listed}; {mpi.vendor} needs {needed}: under srun each rank would be alone",
        remedy="start with `python -m mpicoll.run` inside the allocation",
    )  # fmt: skip


# --- the network between nodes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fabric:
    """A network that MPI should use instead of TCP: its devices on this node, and the transports that can drive it."""

    name: str
    devices: tuple[str, ...]
    transports: tuple[str, ...]


TRANSPORTS = {  # any one of them can drive the fabric
    "InfiniBand": ("UCX", "OFI", "openib", "MVAPICH"),
    "Omni-Path": ("PSM2", "OFI", "MVAPICH"),
    "Slingshot": ("OFI",),
    "EFA": ("OFI",),
}
OPENMPI_COMPONENTS = {"pml:ucx": "UCX", "mtl:ofi": "OFI", "mtl:psm2": "PSM2", "btl:openib": "openib"}


def fabrics(sysfs: Path = Path("/sys/class")) -> list[Fabric]:
    """The fabrics with devices on this node that are up. Not Ethernet, RoCE included: TCP works there too."""
    devices: dict[str, list[str]] = {}
    kinds = [(device, _kind(device)) for device in _entries(sysfs / "infiniband")]
    for device, name in [*kinds, *((device, "Slingshot") for device in _entries(sysfs / "cxi"))]:
        if name is not None:
            devices.setdefault(name, []).append(device.name)
    return [Fabric(name, tuple(names), TRANSPORTS[name]) for name, names in devices.items()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _kind(device: Path) -> str | None:
    """The fabric of a device in /sys/class/infiniband; None: it is Ethernet, or no port is up."""
    ports = _entries(device / "ports")
    states = [read(f"{port}/state") for port in ports]
    if ports and not any("ACTIVE" in state for state in states):
        return None
    if device.name.startswith("hfi1"):
        return "Omni-Path"
    if "efa" in os.path.basename(os.path.realpath(device / "device" / "driver")) or device.name.startswith("efa"):
        return "EFA"
    return "InfiniBand" if any(read(f"{port}/link_layer") == "InfiniBand" for port in ports) else None


def transports(mpi: Mpi, library_version: str, components: str | None) -> tuple[str, ...] | None:
    """The transports of an MPI besides TCP and shared memory; None: unknown.

    Args:
        library_version: Of MPI_Get_library_version; MPICH names its device there.
        components: Output of ``ompi_info --parsable``, for Open MPI; None: there is no ompi_info.
    """
    if mpi.family == "openmpi":
        if components is None:
            return None
        named = re.findall(r"^mca:(\w+:\w+):", components, re.MULTILINE)
        return tuple(sorted({OPENMPI_COMPONENTS[name] for name in named if name in OPENMPI_COMPONENTS}))
    if "MVAPICH" in library_version.upper():
        return ("MVAPICH",)
    if mpi.vendor.startswith("Intel"):
        return ("OFI",)
    device = re.search(r"\bch[34]:([\w ,:]+)", library_version)
    if device is None:
        return None
    return tuple(name for name in ("OFI", "UCX") if name.lower() in device[1].lower())


def ompi_components(mpi: Mpi, environ: Mapping[str, str]) -> str | None:
    """The output of ``ompi_info --parsable`` of an Open MPI; None: it is missing or does not run."""
    if mpi.family != "openmpi":
        return None
    try:
        mpiexec = installations.find_mpiexec(mpi, environ)
    except LaunchError:
        return None
    command = [str(Path(mpiexec.path).parent / "ompi_info"), "--parsable"]
    said = output_of(command, {**without_job(environ), **mpiexec.environ}, TOOL_TIMEOUT_S)
    return said if said is not None and "mca:" in said else None


def check_fabric(
    fabrics_here: list[Fabric], mpi: Mpi, usable: tuple[str, ...] | None, verbs: bool = True, wheels: tuple[str, ...] = ()
) -> list[Finding]:
    """Whether this MPI can use the fabrics of this node.

    Args:
        usable: See `transports`.
        verbs: Whether /dev/infiniband exists, which InfiniBand and EFA need.
        wheels: The installed packages that contain an MPI.
    """
    if not fabrics_here:
        return [Finding("ok", "network", "no InfiniBand, Omni-Path, Slingshot or EFA device here; between nodes, MPI uses TCP")]
    return [_one_fabric(fabric, mpi, usable, verbs, wheels) for fabric in fabrics_here]


def _one_fabric(fabric: Fabric, mpi: Mpi, usable: tuple[str, ...] | None, verbs: bool, wheels: tuple[str, ...]) -> Finding:
    device = f"{fabric.name} ({', '.join(fabric.devices)})"
    if not verbs and fabric.name in ("InfiniBand", "EFA"):
        return Finding(
            "note", "network", f"{device} is here, but not /dev/infiniband: MPI will use TCP between nodes",
            remedy="give the devices to the container (docker --device=/dev/infiniband --ulimit memlock=-1)",
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
