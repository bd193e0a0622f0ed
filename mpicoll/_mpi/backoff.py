"""Waiting in a loop for another process or thread: spin, then yield the core, then sleep."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple

# Not os.sched_yield, which keeps the interpreter's lock before Python 3.12. A ctypes call releases it.
_yield_core: Callable[[], int] = ctypes.CDLL(None).sched_yield


class Naps(NamedTuple):
    """How long a waiting thread sleeps between two looks. All values but ``share`` are seconds."""

    shortest_s: float
    longest_s: float
    share: float  # of the time waited so far: the thread notices a message at most this much later
    idle_after_s: float  # after so long without a message, each sleep takes ``idle_s``
    idle_s: float

    def after(self, waited_s: float) -> float:
        """Returns the seconds to sleep after ``waited_s`` without a message."""
        if waited_s >= self.idle_after_s:
            return self.idle_s
        return min(max(self.shortest_s, self.share * waited_s), self.longest_s)


class Backoff:
    """Pauses between two looks of a thread that waits.

    The stages depend on time and not on the number of looks, because a large message moves only while both sides test it:
    sleeping after some hundred tests made 16 MB between two ranks take 7 ms instead of 1 ms.

    Args:
        spin_s: Until then, `pause` returns at once.
        yield_s: Until then, `pause` gives the core to another thread that can run. Later it sleeps.
        naps: How long it sleeps.
    """

    SPIN_S = 100e-6  # usual latency of a message between two ranks that both run
    YIELD_S = 20e-3  # a blocking MPI call would spin for ever
    NAPS = Naps(50e-6, 50e-6, 0.0, idle_after_s=0.5, idle_s=0.5e-3)  # short as long as a message is likely still moving
    BACKGROUND_NAPS = Naps(50e-6, 50e-6, 0.0, idle_after_s=1.0, idle_s=5e-3)

    def __init__(self, spin_s: float = SPIN_S, yield_s: float = YIELD_S, naps: Naps = NAPS) -> None:
        self._spin_s, self._yield_s, self._naps = spin_s, yield_s, naps
        self._since = time.monotonic()

    @classmethod
    def background(cls) -> Backoff:
        """Sleeps from the first pause on, for a thread that waits for the work of other threads of this process."""
        return cls(0.0, 0.0, cls.BACKGROUND_NAPS)

    def reset(self) -> None:
        """Starts again at the first stage: something has arrived."""
        self._since = time.monotonic()

    def pause(self, moving: bool = False) -> None:
        """Waits as long as the current stage says.

        Args:
            moving: A message is partly here. It moves only while both sides test it, so `pause` does not sleep.
        """
        waited_s = time.monotonic() - self._since
        if waited_s < self._spin_s:
            return
        if moving or waited_s < self._yield_s:
            _yield_core()
        else:
            time.sleep(self._naps.after(waited_s))
