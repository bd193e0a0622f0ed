"""One process is one rank: detects, before MPI starts, a second process that would join the job as the same rank.

A launcher passes each rank its number in environment variables, and every process that the rank starts inherits them. Two
processes that both start MPI as rank 0 hang, or crash inside MPI. So a process claims its rank before it starts MPI:

    launcher ─► the process that it started as rank 0 ("root": python, or a shell round it) ─► children, grandchildren
                              └─ one file for each root, locked (flock) and written by the process that claims the rank

    file locked by another process          that process is the rank                       refused
    not locked, and written                 that process was the rank, and has ended       refused: Open MPI would hang
    missing, or empty                       no process is, or it has finalised MPI         granted

MPI runs once in a rank. `mpirun -n 2 sh -c "python one.py; python two.py"` starts it twice: Open MPI's server may take the end of
the first program for the arrival of the second, and the ranks hang (openpmix issues 3931 and 4113). So the file of a rank of
mpirun stays. Hydra ends the connection of a rank in which MPI has ended. Under other launchers the file is removed.

The file name contains the root's process id and start time, so a file left over by another job never has the same name. The
lock ends with its process. If no such file can be made (no /proc, no writable folder, a file system without locks), every claim
is granted, and nothing guards the rank. Other users may write in the same folder: a name that is not one of ours counts for
nothing, and so does a file of another user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from mpicoll._base import processes
from mpicoll._base.containers import is_launcher
from mpicoll._base.launcher import detect

# These variables name one rank of one job, under any launcher. A process with the same values as its parent is the same rank.
IDENTITY = (
    "OMPI_COMM_WORLD_RANK", "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "PMI_FD", "PMI_PORT", "PMI_ID", "PMI_JOBID",
    "MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK", "PALS_APID", "PALS_RANKID", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID",
    "FLUX_JOB_ID", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK",
)  # fmt: skip
PREFIX = "mpicoll-rank-"  # of the file name; then rank, user, boot, namespace of process ids, the root's id and start time
NAME = re.compile(PREFIX + r"(?P<rank>\d+)-(?P<user>\d+)-[^-]+-(?P<namespace>\d+)-(?P<pid>\d+)-(?P<start>\d+)", re.ASCII)


class Claim:
    """What this process holds of its rank. The only instance is ``claim``."""

    def __init__(self) -> None:
        self._file: tuple[int, Path] | None = None  # descriptor (close-on-exec) and path of the locked file

    def take(self, environ: Mapping[str, str] = os.environ, folder: Path | None = None) -> str | None:
        """Claims for this process the rank that the launcher's variables name. A second call does nothing.

        Returns None if the claim is granted or cannot be checked, otherwise a text that says which process is that rank.
        """
        launch = detect(environ)
        # The task of `srun --pty bash` is a shell, in which MPI programs run one after the other or side by side.
        if self._file is not None or launch is None or (launch.launcher, launch.size) == ("slurm", 1):
            return None
        root = _root(environ)
        if root is None:
            return None
        folder = folder or _folder(environ)
        try:
            _remove_old(folder)
            path = folder / f"{PREFIX}{launch.rank}-{os.getuid()}-{root}"
            return self._lock(path, launch.rank)
        except OSError:  # no such folder, no space, or no locks: no guard
            return None

    def release(self) -> None:
        """Gives the claim back. Called if MPI has not started after all."""
        if self._file is not None:
            descriptor, path = self._file
            self._file = None
            with contextlib.suppress(OSError):  # mpirun has removed its folder already
                path.unlink()
            os.close(descriptor)

    def end(self) -> None:
        """Gives the claim back at the beginning of MPI_Finalize, unless no other process may start MPI in this rank."""
        if self._file is not None and not _is_of_mpirun(self._file[1].parent, os.environ):
            self.release()

    def absent(self, environ: Mapping[str, str] = os.environ) -> list[int]:
        """The ranks of this job that have not started MPI through mpicoll. Empty if unknown, as for a job of several hosts."""
        launch = detect(environ)
        if launch is None or self._file is None or launch.local_size != launch.size:
            return []
        try:
            claims = _files_of_job(self._file[1], environ)
        except OSError:
            return []
        started = {int(words["rank"]) for _, words in claims}
        return sorted(set(range(launch.size)) - started) if claims else []

    def _lock(self, path: Path, rank: int) -> str | None:
        with contextlib.ExitStack() as unless_granted:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            unless_granted.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid != os.getuid():
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"process {_written(descriptor) or '?'} is rank {rank} already"
            if not os.fstat(descriptor).st_nlink:  # the owner removed the file between the open and the lock
                return self._lock(path, rank)
            if owner := _written(descriptor):
                return f"process {owner} was rank {rank} before"
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            unless_granted.pop_all()
        self._file = descriptor, path
        return None

    def forget(self) -> None:
        """Closes the file in a forked child, which would otherwise hold the lock after its parent has ended."""
        if self._file is not None:
            os.close(self._file[0])
            self._file = None


claim = Claim()
os.register_at_fork(after_in_child=claim.forget)


def _files_of_job(own: Path, environ: Mapping[str, str]) -> list[tuple[Path, re.Match[str]]]:
    """The files of the job's ranks on this node, with what their names say. Empty: unknown. ``own``: the file of this rank."""
    files = _files(own.parent)
    if _is_of_mpirun(own.parent, environ):
        return files
    own_words = NAME.fullmatch(own.name)
    assert own_words is not None
    launcher = processes.parent(int(own_words["pid"]))
    return [each for each in files if processes.parent(int(each[1]["pid"])) == launcher] if is_launcher(launcher) else []


def _files(folder: Path) -> list[tuple[Path, re.Match[str]]]:
    """The files of this user's claims, and what their names say."""
    files = []
    for path in folder.glob(PREFIX + "*"):
        words = NAME.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if words is not None and int(words["user"]) == os.getuid() == path.lstat().st_uid:
                files.append((path, words))
    return files


def connection_lost(environ: Mapping[str, str] = os.environ) -> bool:
    """True if Hydra's connection, an inherited file descriptor, was closed on the way to this process, or by Hydra."""
    number = environ.get("PMI_FD", "")
    if not number.isdigit():
        return False
    try:
        mode = os.fstat(int(number)).st_mode
    except OSError:
        return True
    if not (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
        return True
    poll = select.poll()
    poll.register(int(number), 0)
    return bool(poll.poll(0))  # POLLHUP


def _written(descriptor: int) -> str:
    """The process that has claimed the rank; empty: none."""
    return os.pread(descriptor, 32, 0).decode().strip()


def _folder(environ: Mapping[str, str]) -> Path:
    """The folder that Open MPI's mpirun makes for this job and removes after it; otherwise the folder for temporary files."""
    session = environ.get("PMIX_SERVER_TMPDIR", "")
    return Path(session if session and os.access(session, os.W_OK | os.X_OK) else tempfile.gettempdir())


def _is_of_mpirun(folder: Path, environ: Mapping[str, str]) -> bool:
    """Whether Open MPI's mpirun has made the folder for this job, and will remove it."""
    return str(folder) == environ.get("PMIX_SERVER_TMPDIR")


def _remove_old(folder: Path) -> None:
    """Removes files of ranks that were killed or ended without MPI_Finalize: their root process no longer exists."""
    own_namespace = str(processes.namespace("pid"))
    for path, words in _files(folder):
        if words["namespace"] == own_namespace and words["start"] != processes.start(int(words["pid"])):
            path.unlink(missing_ok=True)


def _root(environ: Mapping[str, str]) -> str | None:
    """Identifies the process that the launcher started as this rank, by values that no other process has had.

    None if the system does not provide them.
    """
    own = identity(environ)
    pid = os.getpid()
    while (parent := processes.parent(pid)) > 1 and _is_rank(parent, own):
        pid = parent
    boot = processes.boot()
    return f"{boot[:8]}-{processes.namespace('pid')}-{pid}-{processes.start(pid)}" if boot else None


def _is_rank(pid: int, rank: str) -> bool:
    """True if the process has these launcher variables, as `identity` returns them, and is not a launcher itself."""
    if is_launcher(pid):
        return False
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # a process of another user
        return False
    return identity(dict(word.split("=", 1) for word in words if "=" in word)) == rank


def identity(environ: Mapping[str, str]) -> str:
    """The variables that name one rank of one job, as a text."""
    return " ".join(f"{name}={environ[name]}" for name in IDENTITY if name in environ)
