"""How busy this machine is. Time limits of tests grow with it."""

from __future__ import annotations

import os
from functools import cache

from mpicoll._base import cpus

MOST = 4.0  # a test that never ends must end the run in time
_cores = cache(cpus.usable_cores)


def longer(limit_s: float) -> float:
    """The limit times the number of runnable processes for each usable core in the last minute; at least the limit itself."""
    return round(limit_s * min(MOST, max(1.0, os.getloadavg()[0] / _cores())), 1)
