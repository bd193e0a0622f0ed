"""torch.distributed.rpc (TensorPipe) in child processes of the ranks, which are stopped while mpicoll.rpc is measured.

A thread of TensorPipe polls for messages without a pause, even when idle. In the ranks it would take a core from mpicoll.rpc. So
each rank has a child, which signals stop and continue.

    python -m benchmarks.tensorpipe '{"rank": 0, "size": 2, "host": ..., "port": ..., "sizes": [...]}'

The child of rank 0 reads names of rows from its standard input, one per line, and answers with microseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from mpicoll._base.processes import free_port

PR_SET_PDEATHSIG = 1


class Child:
    """The child of this rank (collective over the communicator; rank 0 finds a port)."""

    def __init__(self, comm: Any, sizes: Sequence[int]) -> None:
        one_host = len(set(comm.allgather(socket.gethostname()))) == 1
        address: Any = None
        if comm.rank == 0:
            address = ("127.0.0.1" if one_host else socket.gethostname(), free_port())
        host, port = comm.bcast(address, root=0)
        job = {"rank": comm.rank, "size": comm.size, "host": host, "port": port, "sizes": list(sizes)}
        command = [sys.executable, "-m", "benchmarks.tensorpipe", json.dumps(job)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read("ready")

    def _read(self, prefix: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith(prefix):
            raise RuntimeError(f"TensorPipe's process has ended: {line.strip() or 'see above'}")
        return line.removeprefix(prefix).strip()

    def measure(self, row: str) -> float:
        """Microseconds of a row; only on rank 0."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{row}\n")
        self.process.stdin.flush()
        return float(self._read("microseconds"))

    def end(self) -> None:
        """Kills the child, even if it is stopped. A shutdown of TensorPipe would need all children to run and to agree."""
        self.process.kill()
        self.process.wait()


def main() -> None:
    from torch.distributed import rpc

    from benchmarks.remote_calls import microseconds, rows

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux: the child ends with its rank, even if it is stopped
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=job["host"], MASTER_PORT=str(job["port"]))
    # torch warns about its own use of Gloo and TorchScript and bypasses filters
    warnings.showwarning = lambda *what, **more: None
    rpc.init_rpc(f"theirs{job['rank']}", rank=job["rank"], world_size=job["size"])
    print("ready", flush=True)
    known = rows(job["sizes"])
    for line in sys.stdin:
        make, calls = known[line.strip()]
        print("microseconds", microseconds(make("theirs"), calls), flush=True)


if __name__ == "__main__":
    main()
