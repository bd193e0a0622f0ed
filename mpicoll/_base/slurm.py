"""What Slurm's environment variables say about an allocation: its nodes, and the tasks on each. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice


def allocated_nodes(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """(host, tasks) of the Slurm allocation that this process is in; empty outside one."""
    nodelist = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", ""))
    hosts = expand_hosts(nodelist) if "SLURM_JOB_ID" in environ else []
    tasks = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", ""))
    return list(zip(hosts, tasks if len(tasks) == len(hosts) else [1] * len(hosts), strict=True))


def cpus_per_task(environ: Mapping[str, str]) -> int | None:
    """Number of CPUs of each task, as ``--cpus-per-task`` has set it; None: it has not."""
    number = environ.get("SLURM_CPUS_PER_TASK", "")
    return int(number) or None if number.isdigit() else None


def tasks_per_node(text: str) -> list[int]:
    """``"4(x2),3"`` is ``[4, 4, 3]``; an empty list if the text is something else."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))] if all(parts) else []


def first_host(nodelist: str) -> str | None:
    """``"node[07-09,12],big1"`` is ``"node07"``; None for an empty list."""
    return next(iter(expand_hosts(nodelist, limit=1)), None)


def expand_hosts(nodelist: str, limit: int | None = None) -> list[str]:
    """``"node[07-09,12],big1"`` is ``["node07", "node08", "node09", "node12", "big1"]``; at most ``limit`` of them."""
    items = re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", nodelist)  # commas inside brackets do not separate
    hosts = (host for item in items if item.strip() for host in _expand(item.strip()))
    return list(islice(hosts, limit))


def _expand(item: str) -> Iterable[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        yield head
        return
    ranges, _, tail = rest.partition("]")
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1) if first.isdigit() and (last or first).isdigit() else ():
            for end in _expand(tail) if tail else ("",):
                yield f"{head}{number:0{len(first)}d}{end}"
