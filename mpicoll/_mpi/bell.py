"""Two bells for each rank of a node, on its board: a waiting thread sleeps on a bell of its rank, and the awaited rank rings it.

    [1] A thread that has found nothing for some time writes on its board for whom it sleeps, and on that rank's board that it is
        waited for. [2] It looks once more. [3] It sleeps until the bell rings, or for a limited time.
    [4] A rank sends or receives a message, and rings the other rank if that one sleeps. Or it comes to a collective: if its own
        board says that it is waited for, it rings the ranks that sleep for it.

Reading a word takes 0.05 us. The last of p ranks to come rings p - 1 times, others ring those that have come to wait for them.
Another word says for whose message a rank waits (`Meeting`): two ranks that wait for each other both stay awake.
The second bell is for threads that wait for control messages of any rank: of RPC, and of the store. Nobody else looks at it.

The threads of a process share a bell, no fence stands between [4] and its look at the word, and a rank may ring too early.
So a ring may be lost, and correctness rests on the limit of [3]. The bell is a futex of Linux. Without one, nobody is woken.

In a virtual machine, Linux may start the woken thread on the core of the ringing rank, although another core is idle. Both
threads then shared a core for 3 ms. So a rank that rings yields its core once, and a woken thread leaves that core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import time
from array import array
from collections.abc import Iterable, Sequence

from mpicoll._mpi.boards import BELL_WORDS, Boards

# The number of the system call; 0: it is not known.
FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 0)
POSSIBLE = bool(FUTEX) and sys.platform == "linux"
WAIT, WAKE = 0, 1
ALL = 0x7FFFFFFF
ASLEEP, WANTED, RINGS, CORE, MEETS, SILENT = range(6)  # words of a rank; the last one is always 0
ANYBODY = -1  # in ASLEEP: for no rank in particular; n + 1: for rank n; 0: no thread sleeps
_libc = ctypes.CDLL(None)


def _step_aside(core: int) -> None:
    """Moves this thread to another core, if it runs on this one and may use others."""
    if core == _libc.sched_getcpu() and len(allowed := os.sched_getaffinity(0)) > 1:
        with contextlib.suppress(OSError):  # the cores of a container may have changed meanwhile
            os.sched_setaffinity(0, allowed - {core})
            os.sched_setaffinity(0, allowed)


class Meeting:
    """Shows for whose message this rank waits meanwhile (None: of any rank), for `Bell.meets`. Wakes that rank."""

    def __init__(self, bell: Bell, rank: int | None) -> None:  # a generator takes 1 us longer
        self._bell, self._whom, self._theirs = bell, 0 if rank is None else rank + 1, bell.places([] if rank is None else [rank])

    def __enter__(self) -> None:
        self._bell.meetings[self] = self._bell.words[self._bell.mine + MEETS] = self._whom
        try:
            self._bell.call(self._theirs)  # they see now that they must stay awake
        except BaseException:  # of a signal's handler
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        words, at, meetings = self._bell.words, self._bell.mine + MEETS, self._bell.meetings
        del meetings[self]
        while words[at] != (last := (0, *meetings.values())[-1]):  # of other threads, or around this one
            words[at] = last


class Bell:
    """The bells of the ranks of ``boards`` as one of them, ``own``, sees them. Without boards no other rank can ring.

    Args:
        which: Of the two bells of each rank.

    Attributes:
        at: Where in ``words`` those of each rank begin that this one can wake.
        everyone: No rank of the world is on another node, from where it could not ring when it needs this rank to move a message.
        words: Of all ranks.
        wanted: The index in ``words`` of this rank's word WANTED.
        meetings: Those of this rank, the last one last: for whose message each waits.
    """

    def __init__(self, boards: Boards | None = None, own: int = 0, apart: bool = False, which: int = 0) -> None:
        alone = array("q", [0] * BELL_WORDS)
        self.words = memoryview(alone) if boards is None else boards.words
        self._address = alone.buffer_info()[0] if boards is None else boards.address
        self._address += 4 * (sys.byteorder == "big")  # a futex has the lower 4 bytes
        self.at = {} if boards is None else {rank: boards.bell(rank, which) for rank in boards.ranks}
        self.everyone = bool(self.at) and not apart
        self._own, self.mine = own, self.at.get(own, 0)
        self.wanted = self.mine + WANTED
        self.meetings: dict[Meeting, int] = {}

    def places(self, ranks: Sequence[int]) -> list[int]:
        """The index in ``words`` of the word ASLEEP of each rank; of a word that is 0 if this rank cannot wake it."""
        return [self.at.get(rank, self.mine + SILENT) for rank in ranks]

    def listen(self, rank: int | None) -> int:
        """[1] Shows that this thread will sleep for a rank (None: any). Returns the number of rings so far, for `sleep`."""
        words, mine = self.words, self.mine
        whom = ANYBODY if rank is None else rank + 1
        words[mine] = whom if words[mine] in (0, whom) else ANYBODY
        if rank in self.at:  # the world may have ended since the thread began to wait
            words[self.at[rank] + WANTED] = 1
        return words[mine + RINGS]

    def sleep(self, rings: int, seconds: float) -> bool:
        """[3] Returns whether the bell has rung since `listen`, which returned ``rings``."""
        if not POSSIBLE:
            time.sleep(seconds)
            return False
        limit = (ctypes.c_long * 2)(int(seconds), int(seconds % 1 * 1e9))  # struct timespec
        self._call(self.mine, WAIT, rings, ctypes.byref(limit))
        if self.words[self.mine + RINGS] == rings:
            return False
        _step_aside(self.words[self.mine + CORE])
        return True

    def meets(self, rank: int | None) -> bool:
        """Whether a rank of the world waits for a message of this one."""
        return rank in self.at and self.words[self.at[rank] + MEETS] == self._own + 1

    def ring(self, at: int) -> None:
        """[4] Wakes the rank of this place."""
        words = self.words
        words[at], words[at + CORE], words[at + RINGS] = 0, _libc.sched_getcpu(), words[at + RINGS] + 1 & ALL
        self._call(at, WAKE, ALL, None)
        _libc.sched_yield()

    def wake(self, rank: int) -> None:
        """[4] Wakes a rank of the world if it sleeps."""
        if (at := self.at.get(rank)) is not None and self.words[at]:
            self.ring(at)

    def wake_own(self) -> None:
        """[4] Wakes the sleeping threads of this rank."""
        if self.words[self.mine]:
            self.ring(self.mine)

    def come(self) -> None:
        """[4] Wakes those that sleep for this rank."""
        self.words[self.wanted] = 0
        self.call(at for rank, at in self.at.items() if rank != self._own)

    def call(self, places: Iterable[int]) -> None:
        """[4] Wakes those of the ranks of these `places` that sleep for this one."""
        for at in places:
            if self.words[at] in (self._own + 1, ANYBODY):
                self.ring(at)

    def _call(self, at: int, what: int, value: int, limit: object) -> None:
        if POSSIBLE:
            _libc.syscall(FUTEX, ctypes.c_void_p(self._address + 8 * (at + RINGS)), what, value, limit, None, 0)


bell, services = Bell(), Bell()  #: of the world


def hang(boards: Boards | None = None, own: int = 0, apart: bool = False) -> None:
    """Gives this rank the bells of its world; None: takes them away."""
    global bell, services
    before, bells = services, [Bell(boards if POSSIBLE else None, own, apart, which) for which in range(2)]
    bell, services = bells
    before.wake_own()  # its threads sleep on the new one
