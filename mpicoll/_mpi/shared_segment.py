"""Memory that the ranks of one node share: one anonymous file in the kernel's memory (memfd), mapped by all of them.

The file has no name in /dev/shm. So the size limit of /dev/shm (64 MiB in many containers) does not apply, no write ends in a
bus error, and a killed rank leaves no file behind. Other ranks reach the file through /proc. If a rank may not (in a container
of its own, say), there is no segment, and MPI carries everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

# Processors on which all ranks see the writes of any rank in the order in which it made them.
ORDERED = frozenset({"x86_64", "AMD64", "i686", "s390x"})
WORD = 16  # bytes; long enough that two random words are never equal by chance, and a multiple of the size of every dtype
LOCATION = struct.Struct(f"=qq{WORD}s")  # process id, file descriptor (-1: no memory), random word


class Segment:
    """Shared memory as one rank sees it.

    Attributes:
        memory: The shared bytes. At first all but the last WORD bytes are zero. Freed when the last view of them has gone.
        fence: Call it between writing data and writing the word that announces the data, and between reading this word and
            reading the data. None if the processor keeps this order by itself.
    """

    def __init__(self, memory: mmap.mmap, ordered: bool) -> None:
        self.memory = memory
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.fence = None if ordered else _fence()


def create(comm: Intracomm, nbytes: int, maker: int = 0, ordered: bool | None = None) -> Segment | None:
    """A segment for every rank of ``comm``, or None on all of them if one rank could not get a segment (collective).

    Args:
        nbytes: Size; equal on ranks with the same maker.
        maker: The rank that makes the segment of this rank. Ranks of one node name the same maker.
        ordered: False: with a fence; None: with a fence if this processor needs one.

    [1] The maker makes the file and writes a random word at its end. [2] It announces the pid and the descriptor. [3] The others
    map the file and look for the word, because in their namespace another process may have this pid. [4] The maker closes the
    file.
    """
    nbytes += WORD
    word, file, memory = os.urandom(WORD), -1, None
    is_maker = comm.Get_rank() == maker
    if is_maker:
        file, memory = _make(nbytes, word)  # [1]
    # Neither bcast (see _engine/consensus.py) nor a node communicator (Note [Communicators are made with the group], windows.py).
    own = LOCATION.pack(os.getpid(), -1 if memory is None else file, word)
    pid, descriptor, its_word = LOCATION.unpack(from_all(comm, own)[maker])  # [2]
    if descriptor >= 0 and not is_maker:
        memory = _mapped_from(nbytes, pid, descriptor, its_word)  # [3]
    complete = all(map(any, from_all(comm, bytes([memory is not None]))))
    if file >= 0:
        os.close(file)  # [4]
    if ordered is None:
        ordered = platform.machine() in ORDERED
    return Segment(memory, ordered) if memory is not None and complete else None


def from_all(comm: Intracomm, record: bytes) -> list[bytes]:
    """Every rank's record, by rank; all have the same size (collective).

    MPI_Allgather raises if a rank dies. MPI_Allgatherv, by which mpi4py gathers objects, may not: see survivors.py.
    """
    found = bytearray(len(record) * comm.Get_size())
    comm.Allgather(record, found)
    return [bytes(found[at : at + len(record)]) for at in range(0, len(found), len(record))]


def _make(nbytes: int, word: bytes) -> tuple[int, mmap.mmap | None]:
    """The file and its memory; -1 if the file, and None if the memory could not be made."""
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
    if hasattr(mmap, "MADV_HUGEPAGE"):  # see _base/huge_pages.py
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _mapped_from(nbytes: int, pid: int, file: int, word: bytes) -> mmap.mmap | None:
    """Maps the open file of a process. None if it cannot, or if the file has another size or does not end with ``word``."""
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    except OSError:
        return None
    try:
        memory = _mapped(descriptor, nbytes) if os.fstat(descriptor).st_size == nbytes else None
        return memory if memory is not None and memory[-WORD:] == word else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


# Note [A fence of two locks]
# MPI_Win_sync is a fence, but needs a window, and Open MPI 4.1.4 of Debian cannot make an empty one (MPI_ERR_WIN). So a
# lock that guards nothing is taken and released twice. One time is not enough: taking a lock is an acquire, releasing it
# a release, and memory operations from before and from after may meet inside. The first release comes after everything before;
# the second acquire comes before everything after; and processors do not exchange a release with a later acquire (Arm, RISC-V:
# RCsc), or both are barriers for all but a load after a store (POWER), which no protocol here relies on. It takes 0.18 us;
# MPI_Win_sync takes 0.07 us (Open MPI 5.0.11, x86; the calls from Python).
def _fence() -> Callable[[], None]:
    """A memory barrier. See Note [A fence of two locks]."""
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:
        acquire()
        release()
        acquire()
        release()

    return fence
