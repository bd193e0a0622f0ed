"""The cores that a process may use, and how busy they are."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def allowed() -> set[int]:
    """The hardware threads in the affinity mask of this process."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def allowed_for(pid: int) -> set[int]:
    """The hardware threads in the affinity mask of another process; empty: it has ended, or may not be queried."""
    try:
        return set(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # not Linux, no such process, or not allowed
        return set()


def quota() -> int | None:
    """The CPU quota of the container in whole cores; None: there is none."""
    words = read("/sys/fs/cgroup/cpu.max").split()
    return max(1, int(words[0]) // int(words[1])) if len(words) == 2 and words[0].isdigit() and words[1].isdigit() else None


def usable_cores() -> int:
    """Number of cores, not hardware threads, that this process may use by its affinity mask and the quota of its container."""
    number = count(allowed())
    return max(1, min(number, quota() or number))


def count(mask: set[int]) -> int:
    """Number of cores, not hardware threads, with a hardware thread in ``mask``."""
    return len(set(map(_core, mask)))


@cache
def _core(cpu: int) -> str:
    """The hardware threads of the core of ``cpu``. Kept: a start asks five times for each of up to several hundred."""
    return read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)


def read(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:  # not Linux, or not shown in this container
        return ""


def longer(limit_s: float) -> float:
    """A time limit of a test times the number of runnable processes for each usable core in the last minute, at most times 4."""
    return round(limit_s * min(4.0, max(1.0, os.getloadavg()[0] / usable_cores())), 1)
