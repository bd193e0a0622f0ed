"""Waiting in a loop for another process or thread: spin, then yield the core, then sleep on this rank's bell."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple

from mpicoll._mpi import bell, runtime

# os.sched_yield keeps the interpreter's lock before Python 3.12. A ctypes call releases it.
_yield_core: Callable[[], int] = ctypes.CDLL(None).sched_yield


class Naps(NamedTuple):
    """How long a waiting thread sleeps between two checks."""

    shortest_s: float
    longest_s: float
    share: float  # part of the time waited so far: the thread notices a message at most this much later

    def after(self, waited_s: float) -> float:
        """Returns the seconds to sleep after ``waited_s`` without a message."""
        return min(max(self.shortest_s, self.share * waited_s), self.longest_s)


def looks(nbytes: int) -> int:
    """Returns after how many looks a message has ended, if it moves. (In the same time, other programs may leave few looks.)"""
    return 100_000 + nbytes // 128  # each takes 1 us at least, and moves 8 KiB at least


class Backoff:
    """Pauses a waiting thread between two checks.

    The stages depend on time and not on the number of checks. A message in shared memory moves only while both sides call MPI.
    So a thread does not sleep while the other side waits for it, too (`moves`). Where that is not known, each nap ends with two
    calls of MPI. The first one moves what the other side has left meanwhile, and brings MPI's code and data into the caches. If
    the second one takes so long that bytes may have moved, the thread does not sleep for `MOVING_S`, and naps are short again.
    A message of 64 MiB between 2 ranks on 2 cores took 100 ms when the sender slept, and takes 14 ms.

    Args:
        rank: Rank of the world for which the thread waits; None: any. It rings, if it has a bell here; see bell.py.
        spin_s: Until this time has passed, `pause` returns at once.
        yield_s: Until this time has passed, `pause` gives the core to another runnable thread. After it, `pause` sleeps.
        naps: Lengths of the sleeps.
        moves: Whether the other side waits for this rank as well, so that neither may sleep.
        serves: The thread waits for control messages, of any rank: it sleeps on the bell of such threads.
    """

    SPIN_S = 100e-6  # usual latency of a message between two running ranks
    YIELD_S = 3e-3  # a blocking MPI call would spin for ever
    NAPS = Naps(50e-6, 2e-3, 0.05)
    WOKEN_NAPS = Naps(1e-3, 50e-3, 0.5)  # on a bell that every rank rings, unless a ring is lost

    MOVED_S = 30e-6  # of CPU time; of calls that find nothing, 99 % take less than 17 us
    MOVING_S = 2e-3

    def __init__(
        self,
        rank: int | None = None,
        spin_s: float = SPIN_S,
        yield_s: float = YIELD_S,
        naps: Naps = NAPS,
        moves: Callable[[], bool] = lambda: False,
        serves: bool = False,
    ) -> None:
        self._rank, self._naps, self._serves = rank if rank in bell.bell.at else None, naps, serves
        self._spin_s, self._yield_s, self._moves = spin_s, yield_s, moves
        self._since, self._moving_until = time.monotonic(), 0.0
        self._rings: int | None = None  # of the bell, while this thread is about to sleep

    def reset(self) -> None:
        """Returns to the first stage. Called when something has arrived."""
        self._since, self._rings = time.monotonic(), None

    def pause(self) -> None:
        """Returns at once, yields the core or sleeps, depending on the current stage."""
        now = time.monotonic()
        waited_s = now - self._since
        if waited_s < self._spin_s:
            return
        if self._moves():  # for a moment longer: the other side may go from one wait to the next
            self._moving_until = now + self.MOVING_S
        if waited_s < self._yield_s or now < self._moving_until:
            _yield_core()
            return
        own_bell = bell.services if self._serves else bell.bell
        if self._rings is None:
            self._rings = own_bell.listen(self._rank)
            return  # the caller looks once more
        woken = (self._serves or self._rank is not None) and own_bell.everyone
        naps = self.WOKEN_NAPS._replace(longest_s=max(self.WOKEN_NAPS.longest_s, self._naps.longest_s)) if woken else self._naps
        nap_s = naps.after(waited_s)
        if own_bell.sleep(self._rings, nap_s):
            self._since, self._rings = time.monotonic() - self._spin_s, None  # a rank may ring before it calls MPI
            return
        self._rings = own_bell.listen(self._rank)
        cells = 1 + int(nap_s * 1e4)  # for 3 % of a nap of 2 ms
        runtime.move(cells)
        if runtime.move(cells) > self.MOVED_S:
            now = time.monotonic()
            self._since, self._moving_until, self._rings = now - self._yield_s, now + self.MOVING_S, None
