"""The nodes that a scheduler has given to the job of this process, and how many ranks each may run.

    scheduler     a job of it has   nodes and slots come from
    Flux          FLUX_URI          ``flux resource R`` (RFC 20): cores of the instance of `flux alloc`, `flux batch`
    Slurm         SLURM_JOB_ID      SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE
    PBS, Torque   PBS_JOBID         the file PBS_NODEFILE, one line for each rank (mpiprocs)
    LSF           LSB_JOBID         the file LSB_DJOB_HOSTFILE, one line for each slot, or LSB_MCPU_HOSTS: "a 4 b 4"
    Grid Engine   PE_HOSTFILE       that file: "a 4 all.q@a UNDEFINED"

The first match counts: Flux and LSF may run inside a job of another scheduler. `find` collects the texts; the parsers are pure.

# Note [The launch node of LSF]
With IBM's Cluster System Manager (CSM_ALLOCATION_ID is set) the batch script runs on a launch node. It is the first host of the
list, and runs no rank.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mpicoll._cpus import read
from mpicoll._discovery.ask import output_of
from mpicoll._discovery.slurm import allocated_nodes, expand_hosts

FLUX_TIMEOUT_S = 20.0  # usual is 0.3 s
Nodes = tuple[tuple[str, int], ...]  # (host, slots), each host once


@dataclass(frozen=True)
class Allocation:
    """A job of a scheduler.

    Args:
        job: Its number; "" where the scheduler sets none.
        tasks: How many ranks the user has asked the scheduler for.
    """

    scheduler: str
    job: str
    nodes: Nodes
    tasks: int

    def __str__(self) -> str:
        return f"{self.scheduler} job {self.job}".rstrip()


def flux_resources(environ: Mapping[str, str]) -> str:
    """What ``flux resource R`` prints; empty if there is no flux, or if it does not answer."""
    said = output_of(["flux", "resource", "R"], environ, FLUX_TIMEOUT_S) or ""
    return next((line for line in said.splitlines() if line.startswith("{")), "")  # warnings may surround it


def find(
    environ: Mapping[str, str],
    text_of: Callable[[str], str] = read,
    flux: Callable[[Mapping[str, str]], str] = flux_resources,
) -> Allocation | None:
    """The allocation that this process is in; None: there is none, or its nodes cannot be read.

    Args:
        text_of: Returns the text of a file, empty if it cannot be read.
        flux: See `flux_resources`.
    """
    get = environ.get
    if "FLUX_URI" in environ and "FLUX_JOB_ID" not in environ:  # in a task of `flux run` the instance is not the job
        return _allocation("Flux", get("FLUX_ENCLOSING_ID", ""), flux_nodes(flux(environ)))
    if "SLURM_JOB_ID" in environ:
        return _allocation("Slurm", environ["SLURM_JOB_ID"], tuple(allocated_nodes(environ)), get("SLURM_NTASKS", ""))
    if "PBS_JOBID" in environ:
        return _allocation("PBS", environ["PBS_JOBID"], lines(text_of(get("PBS_NODEFILE", ""))))
    if "LSB_JOBID" in environ:
        nodes = lines(text_of(get("LSB_DJOB_HOSTFILE", ""))) or lsf_pairs(get("LSB_MCPU_HOSTS", ""))
        return _allocation("LSF", environ["LSB_JOBID"], nodes[1:] if "CSM_ALLOCATION_ID" in environ else nodes)
    if "PE_HOSTFILE" in environ:
        return _allocation("Grid Engine", get("JOB_ID", ""), grid_engine_table(text_of(environ["PE_HOSTFILE"])))
    return None


def _allocation(scheduler: str, job: str, nodes: Nodes, tasks: str = "") -> Allocation | None:
    slots = sum(count for _, count in nodes)
    return Allocation(scheduler, job, nodes, int(tasks) if tasks.isdigit() else slots) if nodes else None


def lines(text: str) -> Nodes:
    """Nodes of a file with a host a line; a host that is repeated has that many slots."""
    return tuple(Counter(line.strip() for line in text.splitlines() if line.strip()).items())


def lsf_pairs(text: str) -> Nodes:
    """``"a 4 b 2"`` is ``(("a", 4), ("b", 2))``; empty if the text is something else."""
    words = text.split()
    return _added(zip(words[::2], words[1::2], strict=False)) if len(words) % 2 == 0 else ()


def grid_engine_table(text: str) -> Nodes:
    """Nodes of a PE_HOSTFILE: host, slots, queue, processors. A host has one line for each of its queues."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return _added((row[0], row[1]) for row in rows) if all(len(row) > 1 for row in rows) else ()


def _added(pairs: Iterable[tuple[str, str]]) -> Nodes:
    slots: Counter[str] = Counter()
    for host, count in pairs:
        if not count.isdigit():
            return ()
        slots[host] += int(count)
    return tuple((host, count) for host, count in slots.items() if count)


def flux_nodes(text: str) -> Nodes:
    """Nodes of a resource set of Flux (RFC 20, version 1), each with the number of its cores; empty if it is something else."""
    try:
        execution = json.loads(text)["execution"]
        hosts = [host for item in execution["nodelist"] for host in expand_hosts(item)]
        cores = {rank: len(numbers(row["children"]["core"])) for row in execution["R_lite"] for rank in numbers(str(row["rank"]))}
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(zip(hosts, (cores[rank] for rank in sorted(cores)), strict=True)) if len(hosts) == len(cores) else ()


def numbers(idset: str) -> list[int]:
    """``"0-2,5"`` is ``[0, 1, 2, 5]``, also in brackets (RFC 22). Raises ValueError for something else."""
    found: list[int] = []
    for part in idset.strip("[]").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ValueError(f"{idset!r} is no set of numbers")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found
