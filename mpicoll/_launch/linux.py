"""What Linux has beyond Python's library: death with the parent, signals that wake a selector, connections that are probed; and
shared memory that a job has left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mpicoll._base.cpus import read
from mpicoll._base.processes import FOLDER, PATTERNS

if TYPE_CHECKING:
    import socket

PR_SET_PDEATHSIG = 1
SFD_NONBLOCK, SFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
SIGSET_BYTES = 128  # sigset_t of glibc and of musl
# A connection between hosts breaks if the other host does not answer: after time + probes * intvl seconds.
KEEPALIVE = {"time": 5, "intvl": 2, "probes": 3}
FROM_KERNEL = 0x80  # si_code of a signal of the terminal, which the whole process group gets


def end_with_parent(parent: int, number: int) -> None:
    """This process gets signal ``number`` when the process ``parent``, its parent, has ended."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux
        prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it has ended before
        os.kill(os.getpid(), number)


def oom_kills(root: str = "") -> int:
    """The number of processes that the kernel has killed for lack of memory, on this host and in the cgroup of this process.

    A container may see only one of the two counters; where it sees both, a process counts twice. ``root``: of the files.
    """
    files = [f"{root}/proc/vmstat"]
    for line in read(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2, and 1
            files += [f"{root}/sys/fs/cgroup{path}/memory.events", f"{root}/sys/fs/cgroup/memory{path}/memory.oom_control"]
    return sum(int(number) for file in files for number in re.findall(r"^oom_kill (\d+)$", read(file), re.MULTILINE))


class Signals:
    """The signals ``numbers``, blocked in this process; `fileno`, for a selector, is ready to be read when one has come."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = frozenset(numbers)
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        mask = sum(1 << (number - 1) for number in self.numbers).to_bytes(SIGSET_BYTES, "little")
        self._file: int = ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, SFD_NONBLOCK | SFD_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "signalfd")

    def fileno(self) -> int:
        return self._file

    def read(self) -> Iterator[signal.struct_siginfo]:
        """The signals that have come."""
        while (info := signal.sigtimedwait(self.numbers, 0)) is not None:
            yield info

    def restore(self) -> None:
        """The mask of signals as it was before; for a child, between fork and exec."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)


def keep_alive(connection: socket.socket) -> None:
    """Lets the connection break when the other host, or the cable, is gone."""
    import socket  # the program, which shares this process until the fork, may not need it

    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle_s, interval_s, probes = KEEPALIVE["time"], KEEPALIVE["intvl"], KEEPALIVE["probes"]
    for option, value in (
        (socket.TCP_KEEPIDLE, idle_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, probes),
        (socket.TCP_USER_TIMEOUT, 1000 * (idle_s + probes * interval_s)),  # while data is on its way there are no probes
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def remove_leftovers(began_s: float, folder: Path = FOLDER) -> None:
    """Removes shared memory that MPI leaves in /dev/shm: MPICH 1 MB per rank, after nearly every job that does not end well.

    A file goes if its name is one that MPI gives, it belongs to this user, it was made after ``began_s`` (seconds since the
    epoch), and no living process has it open or mapped. A process that makes such a file has it open until it has mapped it; so
    open files are looked at first. (The name of MPICH's files is a hash of the name of the job. Hydra tells that name to a rank
    that asks for it, and from then on expects the rank to start MPI: it ended programs that never do.)
    """
    files = {str(file) for pattern in PATTERNS for file in folder.glob(pattern) if _ours(file, began_s)}
    for file in files - set(_used(files)):
        with contextlib.suppress(OSError):  # another process of the job was faster
            os.unlink(file)


def _ours(file: Path, began_s: float) -> bool:
    with contextlib.suppress(OSError):
        facts = file.stat()
        return facts.st_uid == os.getuid() and facts.st_ctime >= began_s
    return False


def _used(files: set[str]) -> Iterator[str]:
    """Those of ``files`` that a process has open or mapped. Processes of other users cannot have opened them."""
    for process in Path("/proc").glob("[0-9]*") if files else ():
        with contextlib.suppress(OSError):  # of another user, or ended
            for name in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(process / "fd" / name)
        with contextlib.suppress(OSError):
            text = (process / "maps").read_text(errors="replace")
            yield from (file for file in files if file in text)
