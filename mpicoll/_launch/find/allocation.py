"""The nodes that a scheduler has given to the job of this process, and how many ranks each may run.

    scheduler     a job of it has   nodes and slots come from
    Slurm         SLURM_JOB_ID      SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE
    PBS, Torque   PBS_JOBID         the file PBS_NODEFILE, one line for each rank (mpiprocs)
    LSF           LSB_JOBID         the file LSB_DJOB_HOSTFILE, one line for each slot, or LSB_MCPU_HOSTS: "a 4 b 4"

The first match counts: LSF may run inside a job of another scheduler. `find` collects the texts; the parsers are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpicoll._base.cpus import read
from mpicoll._base.slurm import allocated_nodes

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


def find(environ: Mapping[str, str], text_of: Callable[[str], str] = read) -> Allocation | None:
    """The allocation that this process is in; None: there is none, or its nodes cannot be read.

    ``text_of`` returns the text of a file, empty if it cannot be read.
    """
    get = environ.get
    if "SLURM_JOB_ID" in environ:
        return _allocation("Slurm", environ["SLURM_JOB_ID"], tuple(allocated_nodes(environ)), get("SLURM_NTASKS", ""))
    if "PBS_JOBID" in environ:
        return _allocation("PBS", environ["PBS_JOBID"], lines(text_of(get("PBS_NODEFILE", ""))))
    if "LSB_JOBID" in environ:
        nodes = lines(text_of(get("LSB_DJOB_HOSTFILE", ""))) or lsf_pairs(get("LSB_MCPU_HOSTS", ""))
        return _allocation("LSF", environ["LSB_JOBID"], nodes)
    return None


def _allocation(scheduler: str, job: str, nodes: Nodes, tasks: str = "") -> Allocation | None:
    slots = sum(count for _, count in nodes)
    return Allocation(scheduler, job, nodes, int(tasks) if tasks.isdigit() else slots) if nodes else None


def lines(text: str) -> Nodes:
    """Nodes of a file with one host per line; a host that is repeated has that many slots."""
    return tuple(Counter(line.strip() for line in text.splitlines() if line.strip()).items())


def lsf_pairs(text: str) -> Nodes:
    """``"a 4 b 2"`` is ``(("a", 4), ("b", 2))``; empty if the text is something else."""
    words, slots = text.split(), Counter[str]()
    if len(words) % 2 or not all(count.isdigit() for count in words[1::2]):
        return ()
    for host, count in zip(words[::2], words[1::2], strict=True):
        slots[host] += int(count)
    return tuple((host, count) for host, count in slots.items() if count)
