"""How busy this machine is. The tests' time limits grow with it."""

import os

from mpicoll._base import cpus

MOST = 4.0  # a test that never ends must end the run in time


def longer(limit_s: float) -> float:
    """The limit times the number of runnable processes for each usable core in the last minute; at least the limit itself."""
    return round(limit_s * min(MOST, max(1.0, os.getloadavg()[0] / cpus.usable_cores())), 1)
