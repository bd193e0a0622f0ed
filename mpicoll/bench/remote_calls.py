"""What a remote call costs, beside torch.distributed.rpc (TensorPipe), measured in turn in one run on two ranks or more.

Rank 0 calls rank 1, which does nothing otherwise. Each answer is checked first. A row of k bytes sends a float32 tensor of
that size there and gets it back; "in flight": calls a second with 64 of them under way, without tensors.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpicoll import rpc as ours
from mpicoll.mpi import runtime

IN_FLIGHT = 64
ROUND_S = 0.2  # seconds that one way is measured for, per round
Way = Callable[[], object]


def nothing() -> None:
    """The empty call."""


def echo(x: Any) -> Any:
    return x


def measure(sizes: Sequence[int], rounds: int, machine: str) -> None:
    """Prints a table on rank 0 (collective over the worlds of both, which it makes and ends)."""
    comm = runtime.start().comm
    if comm.size < 2:
        raise SystemExit("bench rpc: needs two ranks; python -m mpicoll.run -n 2 -m mpicoll.bench rpc")
    theirs = _tensorpipe(comm)
    ours.init_rpc(f"ours{comm.rank}")
    if comm.rank == 0:
        print(
            f"round trip rank 0 -> 1 -> 0, {comm.size} ranks, {machine}; microseconds: median of {rounds} rounds [least, most];"
        )
        print("x: median of the rounds' ratios to TensorPipe; below 1 is faster")
        print(f"{'':>16}  {'TensorPipe':>30}  {'mpicoll.rpc':>30}  {'x':>5}")
        _row("empty call", [_empty(theirs), _empty(ours)], rounds)
        for nbytes in sizes:
            x = torch.rand(nbytes // 4)
            _row(f"{nbytes} bytes", [_echo(theirs, x), _echo(ours, x)], rounds)
        _row(f"{IN_FLIGHT} in flight", [_flight(theirs), _flight(ours)], rounds, IN_FLIGHT)
    comm.barrier()
    ours.shutdown()
    theirs.shutdown()


def _tensorpipe(comm: Any) -> Any:
    from torch.distributed import rpc

    one_host = len(set(comm.allgather(socket.gethostname()))) == 1
    address: Any = None
    if comm.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            address = ("127.0.0.1" if one_host else socket.gethostname(), probe.getsockname()[1])
    host, port = comm.bcast(address, root=0)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    warnings.filterwarnings("ignore", message="You are using a Backend .* as a ProcessGroup")  # torch's own use of Gloo
    rpc.init_rpc(f"theirs{comm.rank}", rank=comm.rank, world_size=comm.size)
    return rpc


def _to(rpc: Any) -> str:
    return "ours1" if rpc is ours else "theirs1"


def _empty(rpc: Any) -> Way:
    return lambda: rpc.rpc_sync(_to(rpc), nothing)


def _echo(rpc: Any, x: torch.Tensor) -> Way:
    if not torch.equal(rpc.rpc_sync(_to(rpc), echo, args=(x,)), x):
        raise AssertionError(f"{rpc.__name__}: a tensor of {x.nbytes} bytes came back changed")
    return lambda: rpc.rpc_sync(_to(rpc), echo, args=(x,))


def _flight(rpc: Any) -> Way:
    def way() -> object:
        return [future.wait() for future in [rpc.rpc_async(_to(rpc), echo, args=(i,)) for i in range(IN_FLIGHT)]]

    if way() != list(range(IN_FLIGHT)):
        raise AssertionError(f"{rpc.__name__}: wrong answers")
    return way


def _row(name: str, ways: Sequence[Way], rounds: int, calls: int = 1) -> None:
    times: list[list[float]] = [[] for _ in ways]
    counts = [max(3, int(ROUND_S / _seconds(way, 3))) for way in ways]
    for _ in range(rounds):
        for way, count, series in zip(ways, counts, times, strict=True):
            series.append(_seconds(way, count) * 1e6 / calls)
    cells = [f"{statistics.median(s):9.1f} [{min(s):8.1f},{max(s):8.1f}]" for s in times]
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    print(f"{name:>16}  {cells[0]:>30}  {cells[1]:>30}  {ratio:5.2f}", flush=True)


def _seconds(way: Way, count: int) -> float:
    for _ in range(3):
        way()
    began = time.perf_counter()
    for _ in range(count):
        way()
    return (time.perf_counter() - began) / count
