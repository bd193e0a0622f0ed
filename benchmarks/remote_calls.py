"""Is mpicoll.rpc faster than torch.distributed.rpc (TensorPipe)? Times remote calls of both in turn, on two ranks or more.

    python -m mpicoll.run -n 2 -m benchmarks.remote_calls

Worker NAME0 calls worker NAME1, which is idle otherwise. Each answer is checked first. A row of k bytes sends a float32 tensor of
that size and gets it back; "in flight": the time per call of 64 concurrent calls without tensors.
"""

from __future__ import annotations

import importlib
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from benchmarks.tensorpipe import Child
from mpicoll import rpc
from mpicoll._mpi import runtime
from mpicoll.bench import options
from mpicoll.bench.options import Parser
from mpicoll.bench.table import spread

IN_FLIGHT = 64
ROUND_S = 0.2  # seconds for one library in one round
Call = Callable[[], object]
RemoteRow = tuple[Callable[[str], Call], int]  # makes the function for library "ours" or "theirs"; number of remote calls in it

_child: Child  # of this rank; remote calls from rank 0 stop and continue it


def library(name: str) -> ModuleType:
    """ "ours" or "theirs"."""
    return importlib.import_module("mpicoll.rpc" if name == "ours" else "torch.distributed.rpc")


def rows(sizes: Sequence[int]) -> dict[str, RemoteRow]:
    """The rows by name. sizes: bytes."""
    by_name: dict[str, RemoteRow] = {"empty call": (_empty, 1)}
    for nbytes in sizes:
        by_name[f"{nbytes} bytes"] = (partial(_echo, torch.rand(nbytes // 4)), 1)
    by_name[f"{IN_FLIGHT} in flight"] = (_flight, IN_FLIGHT)
    return by_name


def microseconds(call: Call, calls: int) -> float:
    """Microseconds per remote call, over as many calls as fit into `ROUND_S`, after a few to warm up."""
    count = max(1, int(ROUND_S / _seconds(call, 1)))
    return _seconds(call, count) * 1e6 / calls


def _seconds(call: Call, count: int) -> float:
    for _ in range(min(count, 3)):
        call()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def nothing() -> None:
    """The empty call."""


def echo(x: Any) -> Any:
    return x


def _empty(name: str) -> Call:
    rpc = library(name)
    return lambda: rpc.rpc_sync(f"{name}1", nothing)


def _echo(x: torch.Tensor, name: str) -> Call:
    rpc = library(name)

    def call() -> Any:
        return rpc.rpc_sync(f"{name}1", echo, args=(x,))

    if not torch.equal(call(), x):
        raise AssertionError(f"{name}: a tensor of {x.nbytes} bytes came back changed")
    return call


def _flight(name: str) -> Call:
    rpc = library(name)

    def call() -> Any:
        return [future.wait() for future in [rpc.rpc_async(f"{name}1", echo, args=(i,)) for i in range(IN_FLIGHT)]]

    if call() != list(range(IN_FLIGHT)):
        raise AssertionError(f"{name}: wrong answers")
    return call


def measure(sizes: Sequence[int], rounds: int) -> None:
    """Prints a table on rank 0 (collective). Makes and ends the RPC worlds of both libraries."""
    global _child
    comm = runtime.start().comm
    if comm.size < 2:
        raise SystemExit("needs two ranks; python -m mpicoll.run -n 2 -m benchmarks.remote_calls")
    _child = Child(comm, sizes)
    rpc.init_rpc(f"ours{comm.rank}")
    if comm.rank == 0:
        machine = f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__}"
        print(
            f"round trip rank 0 -> 1 -> 0, {comm.size} ranks, {machine}; microseconds: median of {rounds} rounds [least, most];"
        )
        print("x: median of the rounds' ratios to TensorPipe; below 1 is faster")
        print(f"{'':>16}  {'TensorPipe':>30}  {'mpicoll.rpc':>30}  {'x':>5}")
        workers = [f"ours{rank}" for rank in range(comm.size)]
        _everywhere(workers, signal.SIGSTOP)
        for row, (make, calls) in rows(sizes).items():
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


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--sizes", type=options.size, nargs="+", default=[4 << 10, 1 << 20, 64 << 20], metavar="S")
    parser.add_argument("--repeat", type=options.count, default=15, metavar="N", help="rounds; default 15")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure(args.sizes, args.repeat)


if __name__ == "__main__":
    main()
