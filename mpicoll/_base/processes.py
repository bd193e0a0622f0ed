"""Processes of this host, as Linux shows them in /proc, and its network. Of an ended process, or elsewhere, nothing is known."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from mpicoll._base.cpus import read

RUNS, ENDED = "runs", "has ended"
STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": ENDED, "X": ENDED, "": ENDED}
FOLDER = Path("/dev/shm")
# Files of shared memory that MPI makes there. The last of each: of MPICH 4.0, and of Open MPI 4, left if its mpiexec is killed.
OF_MPICH = "mpich_shm_*", "mpich_vci_*", "mpich_shar_tmp*"
PATTERNS = *OF_MPICH, "sm_segment.*", "vader_segment.*"


def _field(pid: int, number: int) -> str:
    """A field of /proc/PID/stat, counted from the third one on; empty: unknown."""
    fields = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[number] if number < len(fields) else ""


def state(pid: int) -> str:
    """RUNS, ENDED, "is stopped (SIGSTOP)" or "is stopped by a debugger". A zombie has ended."""
    return STATES.get(_field(pid, 0), RUNS)


def parent(pid: int) -> int:
    """The number of the process that started this one; 0: none, or unknown."""
    return int(_field(pid, 1) or 0)


def start(pid: int) -> str:
    """When the process started, in ticks since the start of the host; empty: unknown."""
    return _field(pid, 19)


def children(pid: int) -> list[int]:
    """The living children of ``pid``, without zombies; empty if they cannot be read."""
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for text in lists for child in text.split() if state(int(child)) != ENDED]


@cache
def boot() -> str:
    """Identifies this start of this host; empty: unknown."""
    return read("/proc/sys/kernel/random/boot_id")


def namespace(kind: str) -> int:
    """Identifies this process's namespace of this kind ("pid", "net"); 0: unknown."""
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def network() -> tuple[str, str, str]:
    """Identifies the network of this process, the host's name first: two containers may have the same name."""
    return socket.gethostname(), boot(), str(namespace("net"))


def free_port() -> int:
    """A TCP port that is free on this machine now; on another first host it is a guess."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def unlink_mapped(patterns: Iterable[str] = PATTERNS, folder: Path = FOLDER) -> None:
    """Removes the names of the files of MPI that this process has mapped: a killed job leaves them. Their memory lasts."""
    names = "|".join(pattern.removesuffix("*") for pattern in patterns)
    for path in set(re.findall(rf" ({folder}/(?:{names})\S*)$", read("/proc/self/maps"), re.MULTILINE)):
        with contextlib.suppress(OSError):  # another rank was faster
            os.unlink(path)
