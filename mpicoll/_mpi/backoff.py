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
    """Returns after how many looks a message of so many bytes has ended, if it moves.

    Each moves 8 KiB at least and takes 1 us at least. Time says less: other programs may use the core between two looks.
    """
    return 100_000 + nbytes // 128


class Backoff:
    """Pauses a waiting thread between two checks.

    The stages depend on time and not on the number of checks. A message in shared memory moves only while both sides call MPI.
    So a thread does not sleep while the other side waits for it, too (`moves`). Where that is not known, each nap ends with a
    call of MPI. After one that takes so long that bytes may have moved, the thread does not sleep for `MOVING_S`, and the next
    nap is short. After two such calls in a row all naps begin with short ones again; one may be slow since its code was not in
    the caches.
    During a nap the peer fills or empties up to 2 MiB (_base/open_mpi_settings.py), whose copy takes longer than `MOVED_S`. A
    message of 64 MiB between 2 ranks on 2 cores took 100 ms when the sender slept, and takes 14 ms.

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

    MOVED_S = 30e-6  # of CPU time; 99 % of the calls that found nothing took less than 23 us after naps of 0.15 and 0.5 ms
    MOVED_AFTER_NAP = 10e-3  # seconds more for each second of the nap: caches are cold then; after 2 ms 99 % took less than 40 us
    MOVING_S = 2e-3
    MOVES_WITHIN_S = 5e-3  # after a longer nap nothing is under way, and the call, its code out of the caches, takes 0.1 ms

    def __init__(
        self,
        rank: int | None = None,
        spin_s: float = SPIN_S,
        yield_s: float = YIELD_S,
        naps: Naps = NAPS,
        moves: Callable[[], bool] = lambda: False,
        serves: bool = False,
    ) -> None:
        self._rank, self._naps, self._serves = rank if rank is not None and bell.bell.reaches(rank) else None, naps, serves
        self._spin_s, self._yield_s, self._moves = spin_s, yield_s, moves
        self._since, self._moving_until = time.monotonic(), 0.0
        self._rings: int | None = None  # of the bell, while this thread is about to sleep
        self._moved = False  # it seems that the call after the last nap has moved bytes

    def reset(self) -> None:
        """Returns to the first stage. Called when something has arrived."""
        self._since, self._rings, self._moved = time.monotonic(), None, False

    def pause(self, moving: bool = False) -> None:
        """Returns at once, yields the core or sleeps, depending on the current stage.

        Args:
            moving: Part of a message has arrived. It moves only while both sides test it, so `pause` does not sleep.
        """
        now = time.monotonic()
        waited_s = now - self._since
        if waited_s < self._spin_s:
            return
        if self._moves():  # for a moment longer: the other side may go from one wait to the next
            self._moving_until = now + self.MOVING_S
        if moving or waited_s < self._yield_s or now < self._moving_until:
            _yield_core()
            return
        own_bell = bell.services if self._serves else bell.bell
        if self._rings is None:
            self._rings = own_bell.listen(self._rank)
            return  # the caller looks once more
        woken = (self._serves or self._rank is not None) and own_bell.everyone
        naps = self.WOKEN_NAPS._replace(longest_s=max(self.WOKEN_NAPS.longest_s, self._naps.longest_s)) if woken else self._naps
        nap_s = naps.after(self._yield_s if self._moved else waited_s)
        if own_bell.sleep(self._rings, nap_s):
            self._since, self._rings = time.monotonic() - self._spin_s, None  # a rank may ring before it calls MPI
            return
        self._rings = own_bell.listen(self._rank)
        if nap_s > self.MOVES_WITHIN_S or runtime.move() <= self.MOVED_S + self.MOVED_AFTER_NAP * nap_s:
            self._moved = False
            return
        now = time.monotonic()
        self._since, self._moved = now - self._yield_s if self._moved else self._since, True
        self._moving_until, self._rings = now + self.MOVING_S, None
