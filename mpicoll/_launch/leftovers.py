"""Removes shared memory that MPI leaves in /dev/shm: MPICH 1 MB per rank, after nearly every job that does not end well.

A file goes if its name is one that MPI gives, it belongs to this user, it was made since the job began, and no living process has
it open or mapped. A process that makes such a file has it open until it has mapped it; so open files are looked at first.
(The name of MPICH's files is a hash of the name of the job. Hydra tells that name to a rank that asks for it, and from then on
expects the rank to start MPI: it ended programs that never do.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
PATTERNS = (
    "mpich_shm_*", "mpich_vci_*", "mpich_shar_tmp*",  # MPICH; the last one: 4.0
    "sm_segment.*",  # Open MPI; left if its mpiexec is killed
)  # fmt: skip


def remove(began_s: float, folder: Path = FOLDER) -> None:
    """Removes the files that were made after ``began_s``, in seconds since the epoch, and that nobody uses."""
    files = {str(file) for pattern in PATTERNS for file in folder.glob(pattern) if _ours(file, began_s)}
    if files:
        for file in files - set(_used(files)):
            with contextlib.suppress(OSError):  # another process of the job was faster
                os.unlink(file)


def _ours(file: Path, began_s: float) -> bool:
    try:
        facts = file.stat()
    except OSError:
        return False
    return facts.st_uid == os.getuid() and facts.st_ctime >= began_s


def _used(files: set[str]) -> Iterator[str]:
    """Those of ``files`` that a process has open or mapped. Processes of other users cannot have opened them."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or ended
            for name in os.listdir(process / "fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(process / "fd" / name)
        with contextlib.suppress(OSError):
            text = (process / "maps").read_text(errors="replace")
            yield from (file for file in files if file in text)
