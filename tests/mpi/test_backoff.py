"""The back-off: its stages, and that a thread that has waited long leaves its core to others."""

import time

import pytest

from mpicoll._mpi.backoff import Backoff, Naps

NAPS = Naps(50e-6, 1e-3, share=0.1, idle_after_s=1.0, idle_s=20e-3)


@pytest.mark.parametrize(("waited_s", "nap_s"), [(0.0, 50e-6), (5e-3, 0.5e-3), (0.5, 1e-3), (1.0, 20e-3), (100.0, 20e-3)])
def test_naps_grow_with_the_time_waited(waited_s: float, nap_s: float) -> None:
    assert NAPS.after(waited_s) == pytest.approx(nap_s)


def test_backoff_sleeps_after_a_while() -> None:
    backoff = Backoff()
    while time.monotonic() - backoff._since < Backoff.NAPS.idle_after_s:
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
