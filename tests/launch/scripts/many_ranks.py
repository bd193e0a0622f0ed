"""An mpiexec that plays the monitors of many ranks: ``many_ranks.py RANKS CULPRIT FIRST``, with options of mpiexec around.

Rank CULPRIT is killed. Rank FIRST notices and says so, all others are ended for it, and the monitor of CULPRIT reports last.
"""

import json
import os
import resource
import socket
import sys
from typing import Any


def line(**said: Any) -> bytes:
    return json.dumps(said).encode() + b"\n"


ranks, culprit, first = map(int, sys.argv[-3:])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
address, port, secret, *_ = os.environ["_MPICOLL_SUPERVISOR"].split()
monitors = []
for rank in range(ranks):
    monitors.append(socket.create_connection((address, int(port))))
    begin = line(number=rank, size=ranks, pid=os.getpid(), host=f"node{rank % 4}")
    monitors[rank].sendall(f"{secret} ".encode() + begin)
why = "has not come to all_reduce: its process 77 has ended"
monitors[first].sendall(line(why=why, why_at=20, why_status=1, culprit=(culprit, True)))
for rank, monitor in enumerate(monitors):
    if rank != culprit:
        monitor.sendall(line(ended_at=30, status=-9))
monitors[culprit].sendall(line(was="0.5 s before, it computed") + line(ended_at=40, status=-9))
sys.exit(1)
