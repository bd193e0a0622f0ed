"""The bandwidth of the network between two nodes, as ``--bandwidth measure`` takes it: one stream of large MPI messages."""

from __future__ import annotations

import time

import numpy as np

from mpicoll.bench.harness import Harness

NBYTES = 8 << 20  # of a message
MESSAGES, LONGEST_S = 8, 4.0  # whichever comes first ends the measurement, after two messages


def measure(harness: Harness) -> tuple[float, int]:
    """Returns GB/s and the other rank: rank 0 sends to the first rank of another node (collective).

    The first message opens the connection and is not counted.

    Raises:
        ValueError: All ranks are on one node; raised on all ranks.
    """
    members, comm = harness.node_members(), harness.control.comm
    other = next((ranks[0] for ranks in members if 0 not in ranks), None)
    if other is None:
        raise ValueError("--bandwidth measure: all ranks are on one node; give the GB/s of the network card")
    memory, times = np.zeros(NBYTES, dtype=np.uint8), list[float]()
    harness.control.arrive()
    if harness.rank == 0:
        since = time.perf_counter()
        going_on = True
        while going_on:
            begun = time.perf_counter()
            comm.Send(memory, other)
            comm.Recv(memory[:1], other)  # it has arrived
            times.append(time.perf_counter() - begun)
            going_on = len(times) < 3 or (len(times) < MESSAGES and time.perf_counter() - since < LONGEST_S)
            comm.send(going_on, other)
    elif harness.rank == other:
        going_on = True
        while going_on:
            comm.Recv(memory, 0)
            comm.Send(memory[:1], 0)
            going_on = comm.recv(source=0)
    best = harness.control.first(min(times[1:], default=0.0))
    return NBYTES / best / 1e9, other
