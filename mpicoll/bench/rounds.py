"""Times several implementations of an operation in turn, round by round.

    round 1:  arrive | barrier | mpicoll x K1 | arrive | barrier | Gloo x K2 | arrive ...      seconds per call = elapsed / K
    round 2:  the same, starting with the next implementation

K is equal on all ranks and chosen so that an implementation takes about ``Pace.round_s`` per round. All ranks meet before and
after each implementation without spinning: a rank that has finished must not take a core from one that has not.
The barrier then starts all ranks at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

import mpicoll
from mpicoll._mpi import runtime
from mpicoll._mpi.library import MPI

Call = Callable[[], object]
Value = TypeVar("Value")
FIRST_NAP_S, LONGEST_NAP_S = 20e-6, 2e-3  # between two tests of a barrier
WARM_UP = 3  # calls before K is chosen, and before each round unless a round has fewer calls


@dataclass(frozen=True)
class Pace:
    rounds: int = 15
    round_s: float = 0.05  # seconds of one implementation in one round
    row_s: float = 8.0  # seconds of a row; slow operations get fewer rounds, at least LEAST
    LEAST = 3


QUICK = Pace(rounds=2, round_s=0.002, row_s=0.5)


class ControlChannel:
    """A communicator of its own (plain mpi4py), separate from the code that is measured (all methods are collective).

    Methods other than ``arrive`` may wait busily.
    """

    def __init__(self) -> None:
        world = runtime.start()
        self.comm = world.base.Dup()
        self.rank, self.size, self.local_rank = world.rank, world.size, world.local_rank
        self.library = world.library

    def arrive(self) -> None:
        """Returns within 2 ms after every rank has called it.

        Sleeps while waiting, because spinning would take a core from a rank that is working.
        """
        request, nap_s = self.comm.Ibarrier(), FIRST_NAP_S
        while not request.Test():
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """The elementwise maximum over all ranks, which bring equally many."""
        self.arrive()
        maxima = np.array(seconds, dtype=np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, maxima, MPI.MAX)
        return [float(value) for value in maxima]

    def first(self, value: Value) -> Value:
        """The value of rank 0, which must be picklable."""
        self.arrive()
        received: Value = self.comm.bcast(value, root=0)
        return received

    def all(self, value: Value) -> list[Value]:
        """The values of all ranks, by rank; they must be picklable."""
        self.arrive()
        return self.comm.allgather(value)

    def close(self) -> None:
        self.comm.Free()


class Rounds:
    """Times calls on all ranks (all methods are collective)."""

    def __init__(self, control: ControlChannel, pace: Pace) -> None:
        self.control, self.pace = control, pace

    def times(self, ways: Mapping[str, Call | None]) -> dict[str, list[float]]:
        """Seconds per call of the slowest rank, by implementation and round.

        Args:
            ways: The same names in the same order on every rank; None: this rank does not take part.
        """
        if not ways:
            return {}
        names = list(ways)
        counts = {name: self._count(ways[name]) for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(self._rounds([seconds * count for count, seconds in counts.values()])):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                times[name].append(self._seconds(ways[name], counts[name][0]))
        flat = self.control.slowest([seconds for name in names for seconds in times[name]])
        rounds = len(flat) // len(names)
        return {name: flat[i * rounds : (i + 1) * rounds] for i, name in enumerate(names)}

    def _rounds(self, seconds: list[float]) -> int:
        """Number of rounds that fit into the time; equal on all ranks, as counts and seconds are."""
        fit = int(self.pace.row_s / sum(seconds)) if sum(seconds) else self.pace.rounds
        return max(min(self.pace.LEAST, self.pace.rounds), min(self.pace.rounds, fit))

    def _count(self, way: Call | None) -> tuple[int, float]:
        """Calls per round, and seconds per call."""
        seconds = self.pace.round_s
        for calls in (1, WARM_UP, 20):  # the first call is not typical: it connects and touches new memory
            seconds = self.control.slowest([self._seconds(way, calls, warm_up=False)])[0]
            if seconds > self.pace.round_s / 4 and calls > 1:
                break
        return max(1, math.ceil(self.pace.round_s / max(seconds, 1e-7))), seconds

    def _seconds(self, way: Call | None, count: int, warm_up: bool = True) -> float:
        self.control.arrive()
        mpicoll.barrier()
        if way is None:
            return 0.0
        for _ in range(WARM_UP if warm_up and count > WARM_UP else 0):
            way()
        began = time.perf_counter()
        for _ in range(count):
            way()
        return (time.perf_counter() - began) / count
