"""The doctor's checks of the cluster: the scheduler, and whether this MPI uses the network between nodes.

Each check is two functions: one collects facts (environment, files, output of a tool); the other is pure and makes `Finding`s.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpicoll._base.cpus import read
from mpicoll._launch.doctor.report import Finding
from mpicoll._launch.find.allocation import Allocation
from mpicoll._launch.find.installations import PMI, Mpi, srun_type

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
    return Finding(
        "note", "srun", f"{listed}; {mpi.vendor} needs {PMI[mpi.family][0]}: under srun each rank would be alone",
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
    "InfiniBand": ("UCX", "OFI"),
    "Omni-Path": ("PSM2", "OFI"),
    "Slingshot": ("OFI",),
    "EFA": ("OFI",),
}


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


# With these an MPI prints, when it starts, which transports it has chosen.
SAYS = {
    "OMPI_MCA_pml_base_verbose": "10",
    "OMPI_MCA_mtl_base_verbose": "10",
    "OMPI_MCA_opal_common_ofi_verbose": "1",
    "MPIR_CVAR_DEBUG_SUMMARY": "1",
    "I_MPI_DEBUG": "4",
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


def check_network(
    fabrics_here: list[Fabric], mpi: Mpi, used: InUse | None, verbs: bool = True, wheels: tuple[str, ...] = ()
) -> list[Finding]:
    """Whether this MPI uses the fabrics of this node.

    Args:
        verbs: Whether /dev/infiniband exists, which InfiniBand and EFA need.
        wheels: The installed packages that contain an MPI.
    """
    if not fabrics_here:
        evidence = () if used is None else (f"chosen by MPI in a process alone: {used.words}",)
        text = "no InfiniBand, Omni-Path, Slingshot or EFA device here; between nodes, MPI uses TCP"
        return [Finding("ok", "network", text, evidence)]
    return [_one_fabric(fabric, mpi, used, verbs, wheels) for fabric in fabrics_here]


def _one_fabric(fabric: Fabric, mpi: Mpi, used: InUse | None, verbs: bool, wheels: tuple[str, ...]) -> Finding:
    device, needed = f"{fabric.name} ({', '.join(fabric.devices)})", " or ".join(fabric.transports)
    if not verbs and fabric.name in ("InfiniBand", "EFA"):
        text = f"{device} is here, but not /dev/infiniband: MPI will use TCP between nodes"
        remedy = "give the devices to the container (docker --device=/dev/infiniband --ulimit memlock=-1)"
    elif used is None:
        text = f"{device} is here; whether {mpi.vendor} uses it is not known: it needs {needed}"
        remedy = "compare `python -m mpicoll.bench latency` between two nodes with TCP's 20 us"
    elif used.transport in fabric.transports:
        return Finding("ok", "network", f"{device}; {mpi.vendor} drives it by {used.words}")
    else:
        text = f"{device} is here, but {mpi.vendor} uses {used.words}, not {needed}: expect TCP's speed between nodes"
        chosen = "OMPI_MCA_pml, FI_PROVIDER, MPIR_CVAR_CH4_NETMOD, UCX_TLS"
        remedy = f"unset what chooses the transport ({chosen}); if nothing does, load the site's MPI (`module load openmpi`, say)"
        remedy += f" and `pip uninstall {' '.join(wheels)}`, which mpi4py finds first" if wheels else ""
    return Finding("note", "network", text, remedy=remedy)
