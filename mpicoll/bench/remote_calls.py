"""`bench rpc`: the time of remote calls, in turn with torch.distributed.rpc (TensorPipe), in one run on two ranks or more.

remote_rows.py has the calls, tensorpipe.py runs TensorPipe.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Sequence

from mpicoll import rpc
from mpicoll._mpi import runtime
from mpicoll.bench.remote_rows import microseconds, rows
from mpicoll.bench.table import spread
from mpicoll.bench.tensorpipe import Child

_child: Child  # of this rank; remote calls from rank 0 stop and continue it


def measure(sizes: Sequence[int], rounds: int, machine: str, width: int) -> None:
    """Prints a table on rank 0 (collective). Makes and ends the RPC worlds of both libraries.

    Args:
        sizes: Bytes.
        width: Of the network, see remote_pipeline.py.
    """
    global _child
    comm = runtime.start().comm
    if comm.size < 2:
        raise SystemExit("bench rpc: needs two ranks; python -m mpicoll.run -n 2 -m mpicoll.bench rpc")
    _child = Child(comm, sizes, width)
    rpc.init_rpc(f"ours{comm.rank}")
    if comm.rank == 0:
        print(
            f"round trip rank 0 -> 1 -> 0, {comm.size} ranks, {machine}; microseconds: median of {rounds} rounds [least, most];"
        )
        print("x: median of the rounds' ratios to TensorPipe; below 1 is faster")
        print(f"{'':>16}  {'TensorPipe':>30}  {'mpicoll.rpc':>30}  {'x':>5}")
        workers = [f"ours{rank}" for rank in range(comm.size)]
        _everywhere(workers, signal.SIGSTOP)
        for row, (make, calls) in rows(sizes, width).items():
            way = make("ours")
            times: list[tuple[float, float]] = []
            for _ in range(rounds):
                _everywhere(workers, signal.SIGCONT)
                tensorpipe = _child.measure(row)
                _everywhere(workers, signal.SIGSTOP)
                times.append((tensorpipe, microseconds(way, calls)))
            _print(row, times)
    rpc.shutdown()
    _child.end()


def send(number: signal.Signals) -> None:
    _child.process.send_signal(number)


def _everywhere(workers: list[str], number: signal.Signals) -> None:
    for worker in workers:
        rpc.rpc_sync(worker, send, args=(number,))


def _print(row: str, times: Sequence[tuple[float, float]]) -> None:
    cells = [spread(series, lambda us: f"{us:.1f}") for series in zip(*times, strict=True)]
    ratio = statistics.median(ours / tensorpipe for tensorpipe, ours in times)
    print(f"{row:>16}  {cells[0]:>30}  {cells[1]:>30}  {ratio:5.2f}", flush=True)
