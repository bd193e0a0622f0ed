"""The doctor's checks of the cluster: the scheduler, and whether this MPI can use the network between nodes.

Each check is two functions: one collects facts (environment, files, output of a tool); the other is pure and makes `Finding`s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


# --- the transport in use ---------------------------------------------------------------------------------------------

# With these an MPI prints, when it starts, which transports it has chosen.
SAYS = {
    "OMPI_MCA_pml_base_verbose": "10",
    "OMPI_MCA_mtl_base_verbose": "10",
    "OMPI_MCA_opal_common_ofi_verbose": "1",
    "MPIR_CVAR_DEBUG_SUMMARY": "1",
}
WITHOUT_FABRIC = ("tcp", "sockets", "udp", "shm", "net")  # providers of libfabric


class InUse(NamedTuple):
    """``words``: the components. ``transport``: the one of `TRANSPORTS` that drives a fabric here; empty: none."""

    words: str
    transport: str


def in_use(said: str) -> InUse | None:
    """The transport between nodes that an MPI has chosen, from what it printed with `SAYS`; None: unknown."""

    def named(pattern: str) -> str:
        return str((re.findall(pattern, said) or [""])[-1])

    pml, provider = named(r"selected (\w+) best priority"), named(r"(?:libfabric |mtl:ofi:)provider: ([\w;]+)")
    if pml:
        words, chosen = f"pml/{pml}", pml
        if pml == "cm":
            chosen = named(r"\( *mtl\) Selected component \[(\w+)\]")
            words += f", mtl/{chosen}"
    elif "UCX netmod" in said or provider:
        chosen = "ofi" if provider else "ucx"
        words = f"ch4:{chosen}"
    else:
        return None
    if chosen == "ofi":
        words += f", provider {provider}"
    drives = chosen != "ofi" or provider.split(";")[0] not in WITHOUT_FABRIC
    return InUse(words, {"ucx": "UCX", "ofi": "OFI", "psm2": "PSM2"}.get(chosen, "") if drives else "")


def check_in_use(used: InUse | None, fabrics_here: list[Fabric], usable: tuple[str, ...] | None) -> list[Finding]:
    """Whether the transport in use drives the fabrics that this MPI can use."""
    if used is None:
        return []
    unused = [each for each in fabrics_here if {*each.transports} & {*(usable or ())} - {"openib", "MVAPICH"}]
    unused = [each for each in unused if used.transport not in each.transports]
    if not unused:
        return [Finding("ok", "transport", f"{used.words} (chosen by MPI in this process alone)")]
    names = ", ".join(each.name for each in unused)
    wanted = ", ".join(dict.fromkeys(name for each in unused for name in each.transports))
    text = f"{used.words} does not use the {names} of this node, which MPI could: expect TCP's speed between nodes"
    remedy = f"unset what chooses the transport (OMPI_MCA_pml, FI_PROVIDER, MPIR_CVAR_CH4_NETMOD, UCX_TLS), or choose {wanted}"
    return [Finding("note", "transport", text, remedy=remedy)]


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
