"""Memory that the ranks of one node share: one anonymous file of the kernel's, mapped by all of them.

No name in /dev/shm: its size limit (64 MiB in many containers) does not count, so that no write ends in a bus error, and
nothing is left behind by a rank that is killed. Other ranks reach the file through /proc; where they may not (a rank in a
container of its own, say), there is no segment, and MPI carries everything.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import platform
import secrets
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from mpicoll._mpi.library import MPI

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Processors that show every rank's writes to all others in the order in which they were made.
ORDERED = frozenset({"x86_64", "AMD64", "i686", "s390x"})
WORD = 16  # bytes; more than chance makes alike, and a multiple of every dtype's size


class Segment:
    """``memory``: the shared bytes, all zero at first but the last WORD; they go when the last view of them has gone.

    ``fence``: to be called between writing data and the word that tells of it, and between reading that word and the data;
    None where the processor keeps this order by itself.
    """

    def __init__(self, memory: mmap.mmap, ordered: bool) -> None:
        self.memory = memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.fence = None if ordered else _fence()


def create(comm: Intracomm, nbytes: int, maker: int = 0, ordered: bool = platform.machine() in ORDERED) -> Segment | None:
    """A segment for every rank of ``comm``, or None on all of them if one could not have its own (collective).

    Args:   maker: the rank that makes this rank's; ranks of one node name the same one. nbytes: alike where the maker is.
            ordered: False: with a fence.

    [1] the maker makes the file and writes a random word at its end [2] tells where it is [3] the others map it, and look
    for the word, since a process of that number may be another one where they are [4] the maker closes the file.
    """
    nbytes += WORD
    word, file, memory = secrets.token_bytes(WORD), -1, None
    made = comm.Get_rank() == maker
    if made:
        file, memory = _made(nbytes, word)
    # Neither bcast nor a communicator of the node's: see topology.discover, and carrier.py.
    place = comm.allgather((os.getpid(), file, word) if memory is not None else None)[maker]
    if place is not None and not made:
        memory = _mapped_from(nbytes, *place)
    everybody = all(comm.allgather(memory is not None))
    if file >= 0:
        os.close(file)
    return Segment(memory, ordered) if memory is not None and everybody else None


def _made(nbytes: int, word: bytes) -> tuple[int, mmap.mmap | None]:
    """The file, -1 if there is none, and its memory."""
    file = -1
    try:
        file = os.memfd_create("mpicoll")
        os.ftruncate(file, nbytes)
        memory = _mapped(file, nbytes)
    except (OSError, AttributeError):
        return file, None
    memory[-WORD:] = word
    return file, memory


def _mapped(file: int, nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(file, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return memory  # a kernel without large pages
    return memory


def _mapped_from(nbytes: int, pid: int, file: int, word: bytes) -> mmap.mmap | None:
    try:
        mine = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    except OSError:
        return None
    try:
        memory = _mapped(mine, nbytes) if os.fstat(mine).st_size == nbytes else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(mine)
    return memory if memory is not None and memory[-WORD:] == word else None


@cache
def _fence() -> Callable[[], None]:
    """MPI's own memory barrier is MPI_Win_sync, which wants a window, be it an empty one of this rank alone."""
    window = MPI.Win.Create(None, comm=MPI.COMM_SELF)
    window.Lock_all()

    owner = os.getpid()

    def free() -> None:
        if os.getpid() == owner and not MPI.Is_finalized():
            window.Unlock_all()
            window.Free()

    atexit.register(free)
    return window.Sync
