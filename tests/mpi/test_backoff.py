"""The back-off: its stages, and that a thread that has waited long leaves its core to others."""

import itertools
import time

import pytest

from mpicoll._mpi import bell, runtime
from mpicoll._mpi.backoff import Backoff, Naps

NAPS = Naps(50e-6, 1e-3, share=0.1)


@pytest.mark.parametrize(("waited_s", "nap_s"), [(0.0, 50e-6), (5e-3, 0.5e-3), (0.5, 1e-3), (100.0, 1e-3)])
def test_naps_grow_with_the_time_waited(waited_s: float, nap_s: float) -> None:
    assert NAPS.after(waited_s) == pytest.approx(nap_s)


def test_backoff_sleeps_after_a_while() -> None:
    backoff = Backoff()
    while time.monotonic() - backoff._since < Backoff.NAPS.longest_s / Backoff.NAPS.share:
        backoff.pause()
    before, began = time.process_time(), time.monotonic()
    while time.monotonic() - began < 0.3:
        backoff.pause()
    assert time.process_time() - before < 0.15


def test_backoff_returns_at_once_after_a_reset() -> None:
    backoff = Backoff(spin_s=10.0, yield_s=10.0)
    backoff._since -= 20
    backoff.reset()
    began = time.monotonic()
    for _ in range(100):
        backoff.pause()
    assert time.monotonic() - began < 1.0


class Silent(bell.Bell):
    """A bell that does not ring. Records the naps, and takes no time."""

    def __init__(self) -> None:
        super().__init__()
        self.naps: list[float] = []

    def sleep(self, rings: int, seconds: float) -> bool:
        self.naps.append(seconds)
        return False


def test_a_thread_does_not_sleep_while_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    took, silent = [0.0], Silent()
    monkeypatch.setattr(runtime, "move", lambda cells: took[0])
    monkeypatch.setattr(bell, "bell", silent)
    backoff = Backoff()
    backoff._since -= 1.0
    for _ in range(3):  # the first one only says that the thread will sleep
        backoff.pause()
    assert silent.naps == [Backoff.NAPS.longest_s] * 2

    took[0] = 1e-3
    while len(silent.naps) < 3:
        backoff.pause()
    began = time.monotonic()
    while time.monotonic() - began < Backoff.MOVING_S / 2:
        backoff.pause()
    assert len(silent.naps) == 3
    while len(silent.naps) < 5:
        backoff.pause()
    assert max(silent.naps[3:]) < Backoff.NAPS.longest_s


def test_a_slow_first_call_after_a_nap_does_not_shorten_the_naps(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI's code is not in the caches then. An idle thread woke 1,400 times a second when its naps began anew each time."""
    calls, silent = itertools.count(1), Silent()
    monkeypatch.setattr(runtime, "move", lambda cells: 1e-3 * (next(calls) % 2))
    monkeypatch.setattr(bell, "bell", silent)
    backoff = Backoff()
    backoff._since -= 1.0
    while len(silent.naps) < 100:
        backoff.pause()
    assert silent.naps == [Backoff.NAPS.longest_s] * 100


def test_a_thread_does_not_sleep_while_the_other_side_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, silent = [True], Silent()
    monkeypatch.setattr(runtime, "move", lambda cells: 0.0)  # a call that finds nothing may take long on a slow machine
    monkeypatch.setattr(bell, "bell", silent)
    backoff = Backoff(moves=lambda: waits[0])
    backoff._since -= 1.0
    for _ in range(100):
        backoff.pause()
    assert silent.naps == []
    waits[0] = False  # for a moment it stays awake: the other side may go from one wait to the next
    backoff.pause()
    assert silent.naps == []
    backoff._moving_until = 0.0
    for _ in range(3):
        backoff.pause()
    assert silent.naps == [Backoff.NAPS.longest_s] * 2


def test_more_calls_where_each_moves_8_kib(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH on Ubuntu: by the length of each nap."""
    moved, silent = [], Silent()
    monkeypatch.setattr(runtime, "move", lambda cells: moved.append(cells) or 0.0)
    monkeypatch.setattr(bell, "bell", silent)
    backoff = Backoff()
    backoff._since -= 1.0
    for _ in range(2):  # the first one only says that the thread will sleep
        backoff.pause()
    assert moved == [1 + int(Backoff.NAPS.longest_s * 1e4)] * 2


def test_a_call_that_finds_nothing_to_move_has_moved_nothing() -> None:
    took = []
    for _ in range(20):
        time.sleep(1e-3)
        took.append(runtime.move())
    assert sorted(took)[10] < Backoff.MOVED_S
