"""An mpiexec that plays the monitors of many ranks: ``many_ranks.py RANKS CULPRIT FIRST``, with options of mpiexec around.

Rank CULPRIT is killed. Rank FIRST notices and says so, all others are ended for it, and the monitor of CULPRIT reports last.
"""

import os
import resource
import socket
import sys

ranks, culprit, first = map(int, sys.argv[-3:])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
address, port, secret, *_ = os.environ["_MPICOLL_SUPERVISOR"].split()
monitors = []
for rank in range(ranks):
    monitors.append(socket.create_connection((address, int(port))))
    monitors[rank].sendall(f"begin {secret} {rank} {ranks} {os.getpid()} node{rank % 4}\n".encode())
monitors[first].sendall(f"culprit {culprit} 1\nwhy 20 1 has not come to all_reduce: its process 77 has ended\n".encode())
for rank, monitor in enumerate(monitors):
    if rank != culprit:
        monitor.sendall(b"ended 30 -9 0\n")
monitors[culprit].sendall(b"was 0.5 it computed\nended 40 -9 0\n")
sys.exit(1)
