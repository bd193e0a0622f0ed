"""Waiting in a loop for another process or thread: spin, then yield the core, then sleep."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple

# os.sched_yield keeps the interpreter's lock before Python 3.12. A ctypes call releases it.
_yield_core: Callable[[], int] = ctypes.CDLL(None).sched_yield


class Naps(NamedTuple):
    """How long a waiting thread sleeps between two checks. All values except ``share`` are seconds."""

    shortest_s: float
    longest_s: float
    share: float  # part of the time waited so far: the thread notices a message at most this much later
    idle_after_s: float  # after this time without a message, each sleep takes ``idle_s``
    idle_s: float

    def after(self, waited_s: float) -> float:
        """Returns the seconds to sleep after ``waited_s`` without a message."""
        if waited_s >= self.idle_after_s:
            return self.idle_s
        return min(max(self.shortest_s, self.share * waited_s), self.longest_s)


class Backoff:
    """Pauses a waiting thread between two checks.

    The stages depend on time and not on the number of checks, because a large message moves only while both sides test it.
    When ranks slept after some hundred tests, 16 MB between two ranks took 7 ms instead of 1 ms.

    Args:
        spin_s: Until this time has passed, `pause` returns at once.
        yield_s: Until this time has passed, `pause` gives the core to another runnable thread. After it, `pause` sleeps.
        naps: Lengths of the sleeps.
    """

    SPIN_S = 100e-6  # usual latency of a message between two running ranks
    YIELD_S = 20e-3  # a blocking MPI call would spin for ever
    NAPS = Naps(50e-6, 50e-6, 0.0, idle_after_s=0.5, idle_s=0.5e-3)  # short while a message is probably still moving
    BACKGROUND_NAPS = Naps(50e-6, 50e-6, 0.0, idle_after_s=1.0, idle_s=5e-3)

    PATIENT_YIELD_S = 3e-3
    PATIENT_NAPS = Naps(50e-6, 2e-3, 0.05, idle_after_s=1.0, idle_s=2e-3)

    def __init__(self, spin_s: float = SPIN_S, yield_s: float = YIELD_S, naps: Naps = NAPS) -> None:
        self._spin_s, self._yield_s, self._naps = spin_s, yield_s, naps
        self._since = time.monotonic()

    @classmethod
    def background(cls) -> Backoff:
        """Sleeps from the first pause on, for a thread that waits for the work of other threads of this process."""
        return cls(0.0, 0.0, cls.BACKGROUND_NAPS)

    @classmethod
    def patient(cls) -> Backoff:
        """For a rank that may wait for another one for minutes: after some milliseconds it takes some percent of a core."""
        return cls(yield_s=cls.PATIENT_YIELD_S, naps=cls.PATIENT_NAPS)

    def reset(self) -> None:
        """Returns to the first stage. Called when something has arrived."""
        self._since = time.monotonic()

    def pause(self, moving: bool = False) -> None:
        """Returns at once, yields the core or sleeps, depending on the current stage.

        Args:
            moving: Part of a message has arrived. It moves only while both sides test it, so `pause` does not sleep.
        """
        waited_s = time.monotonic() - self._since
        if waited_s < self._spin_s:
            return
        if moving or waited_s < self._yield_s:
            _yield_core()
        else:
            time.sleep(self._naps.after(waited_s))
