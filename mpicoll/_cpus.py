"""The cores that a process may use."""

from __future__ import annotations

import os
from pathlib import Path


def allowed() -> set[int]:
    """The hardware threads of this process's affinity mask."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def allowed_for(pid: int) -> set[int]:
    """The hardware threads of another process's affinity mask; empty: it has ended, or it may not be asked."""
    try:
        return set(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # not Linux; no such process, or none that this user may see
        return set()


def quota() -> int | None:
    """The whole cores that the container's CPU quota allows, if it has one."""
    given = read("/sys/fs/cgroup/cpu.max").split()
    return max(1, int(given[0]) // int(given[1])) if len(given) == 2 and given[0].isdigit() and given[1].isdigit() else None


def usable_cores() -> int:
    """Cores, not hardware threads, that this process may use: affinity mask and the container's CPU quota count."""
    number = count(allowed())
    return max(1, min(number, quota() or number))


def count(mask: set[int]) -> int:
    """Number of cores, not hardware threads, that an affinity mask has a part of."""
    return len({read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in mask})


def read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not Linux, or not shown in this container
        return ""
