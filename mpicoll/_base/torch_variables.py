"""The variables that torch reads: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR, MASTER_PORT ...

torchrun sets them. In a rank of an MPI launcher, ``import torch`` sets those that are unset, as far as the launcher tells them.
init_process_group sets what only MPI knows: the number of the node, and where to meet (_c10d/store.py, rendezvous.py).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, MutableMapping

from mpicoll._base.launcher import Launch, detect, integer
from mpicoll._base.slurm import first_host

DEFAULT_MASTER_PORT = 29500  # default of torch; used where the launcher sets nothing that is unique to the job
# Below the ephemeral ports of Linux (32768 and up), so that no outgoing connection holds it
FIRST_MASTER_PORT, MASTER_PORTS = 20000, 10000
PROVIDED = "_MPICOLL_PROVIDED"  # set by `provide`, "RANK=0 WORLD_SIZE=4": a child may replace these values

NODE_VARIABLES = ("GROUP_RANK", "NODE_RANK")  # the number of the node: as torchrun names it, and as Lightning does
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *NODE_VARIABLES)
TORCH_VARIABLES = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")


def provide(environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets `TORCH_VARIABLES` where they are unset, as torchrun does.

    Does nothing without an MPI launcher, and never changes a value that the user, torchrun or `mpicoll.run` has set. On several
    hosts MASTER_ADDR stays unset if no scheduler names the first host, and the number of the node if the launcher does not
    give it; init_process_group then learns them through MPI.
    """
    launch = detect(environ)
    if launch is None:
        return
    for name in set_by_us(environ):  # inherited from a rank that started this process: may be out of date
        del environ[name]
    values = _torch_values(launch, environ)
    environ.pop(PROVIDED, None)
    _set(values, environ)


def provide_node_rank(node_rank: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Sets GROUP_RANK and NODE_RANK where they are unset, to the number of this node as MPI has told it."""
    _set(dict.fromkeys(NODE_VARIABLES, str(node_rank)), environ)


def provide_meeting(address: str, port: int) -> None:
    """Sets MASTER_ADDR and MASTER_PORT where they are unset, to what the ranks have learnt from each other."""
    os.environ.setdefault("MASTER_ADDR", address)
    os.environ.setdefault("MASTER_PORT", str(port))


def _torch_values(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    address = "localhost" if launch.local_size == launch.size else first_host(_nodelist(launch, environ))
    node = _node_rank(launch, environ)
    values = (launch.rank, launch.size, launch.local_rank, launch.local_size, node, node, address, _master_port(environ))
    return {name: str(value) for name, value in zip(TORCH_VARIABLES, values, strict=True) if value is not None}


def _node_rank(launch: Launch, environ: Mapping[str, str]) -> int | None:
    """The number of this node; None: unknown. (Under mpirun, SLURM_NODEID counts the nodes of the step of mpirun's daemons.)"""
    if launch.local_size == launch.size:
        return 0
    return integer(environ.get({"pals": "PALS_NODEID", "slurm": "SLURM_NODEID"}.get(launch.launcher, "")))


def _nodelist(launch: Launch, environ: Mapping[str, str]) -> str:
    """The host list of Slurm for this job. mpirun in an allocation starts rank 0 on the first host by default."""
    step = environ.get("SLURM_STEP_NODELIST", "") if launch.launcher == "slurm" else ""
    return step or environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", ""))


def _master_port(environ: Mapping[str, str]) -> int:
    """One port for all ranks of this job and, most likely, another port for the next job on this host."""
    job = next(filter(None, map(environ.get, ("PMIX_NAMESPACE", "PALS_APID", "PMI_JOBID", "FLUX_JOB_ID"))), "")
    if not job and "SLURM_JOB_ID" in environ:
        job = environ["SLURM_JOB_ID"] + "." + environ.get("SLURM_STEP_ID", "")
    return FIRST_MASTER_PORT + zlib.crc32(job.encode()) % MASTER_PORTS if job else DEFAULT_MASTER_PORT


def _set(values: Mapping[str, str], environ: MutableMapping[str, str]) -> None:
    """Sets the variables that are unset, and lists them in `PROVIDED`."""
    new = {name: value for name, value in values.items() if name not in environ}
    environ.update(new)
    listed = [*environ.get(PROVIDED, "").split(), *(f"{name}={value}" for name, value in new.items())]
    if listed:
        environ[PROVIDED] = " ".join(listed)


def set_by_us(environ: Mapping[str, str]) -> list[str]:
    """The variables that `provide` has set, in this process or a parent, and that have not changed since."""
    return [name for name in unchanged(environ.get(PROVIDED, "").split(), environ) if name in TORCH_VARIABLES]


def unchanged(items: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """The names of those NAME=VALUE that are true."""
    return [name for name, _, value in (item.partition("=") for item in items) if environ.get(name) == value]
