"""How long after a late rank do the others return? Beside raw MPI and Gloo, microseconds, median and 90 % of the rounds.

    python -m mpicoll.run -n 2 -m benchmarks.late            MILLISECONDS...; default: 1 5 20 100

The last rank sleeps, takes the time, and calls. The slowest of the others counts. The last rank sets the key of a store; for
rpc_sync the function sleeps. Then a step of DDP to which the last rank comes 20 ms late, and the CPU time of a rank that waits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from benchmarks.session import mpi_name
from mpicoll import rpc

WAYS = ("MPI", "API", "torch", "Gloo")
ROUNDS = 25
DDP_LATE_S, WAIT_S = 20e-3, 5.0
Call = Callable[[], object]


def returned_late(seconds: float) -> float:
    """Runs on the late rank. Returns the time at its end."""
    time.sleep(seconds)
    return time.monotonic()


class Bench:
    """Times calls in the world. comm: for what is not measured."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.last = self.size - 1
        self.keys = 0

    def after(self, call: Call, late_s: float, rounds: int = ROUNDS) -> list[float]:
        """How long after the late rank's call the slowest of the others returned, in seconds, for each round."""
        found = []
        for _ in range(rounds):
            self.comm.Barrier()
            if self.rank == self.last:
                time.sleep(late_s)
                began = time.monotonic()
                call()
                ended = began
            else:
                call()
                began, ended = 0.0, time.monotonic()
            everybody = self.comm.allgather((began, ended))
            found.append(max(end for _, end in everybody[:-1]) - everybody[-1][0])
        return found

    def cpu(self, call: Call) -> float:
        """How much of a core rank 0 uses in percent while it waits for the late rank."""
        self.comm.Barrier()
        before = time.process_time()
        self.after(call, WAIT_S, 1)
        return float(self.comm.bcast((time.process_time() - before) / WAIT_S * 100))

    def messages(self, send: Callable[[Any, int], object], recv: Callable[[Any, int], object], memory: object) -> Call:
        """A message from the last rank to each of the others."""

        def call() -> None:
            for other in range(self.last) if self.rank == self.last else ():
                send(memory, other)
            if self.rank != self.last:
                recv(memory, self.last)

        return call

    def key(self, store: Any) -> Call:
        def call() -> None:
            self.keys += 1
            if self.rank == self.last:
                store.set(f"key {self.keys}", "value")
            else:
                store.get(f"key {self.keys}")

        return call


def operations(bench: Bench, gloo: Any) -> dict[str, dict[str, Call]]:
    """The calls of each operation by way."""
    small, large, comm, last = torch.ones(2), torch.ones(1 << 18), bench.comm, bench.last
    two, many = [small.numpy(), MPI.FLOAT], [large.numpy(), MPI.FLOAT]
    found: dict[str, dict[str, Call]] = {
        "all_reduce 8 B": {"MPI": partial(comm.Allreduce, MPI.IN_PLACE, two)},
        "all_reduce 1 MiB": {"MPI": partial(comm.Allreduce, MPI.IN_PLACE, many)},
        "broadcast 8 B": {"MPI": partial(comm.Bcast, two, last)},
        "barrier": {"MPI": comm.Barrier},
        "recv 8 B": {"MPI": bench.messages(comm.Send, comm.Recv, two)},
        "Work.wait 8 B": {"MPI": lambda: comm.Iallreduce(MPI.IN_PLACE, two).Wait()},
        "store.get": {"API": bench.key(torch.distributed.distributed_c10d._get_default_store())},
    }

    def add(way: str, module: Any, group: Any) -> None:
        found["all_reduce 8 B"][way] = partial(module.all_reduce, small, group=group)
        found["all_reduce 1 MiB"][way] = partial(module.all_reduce, large, group=group)
        found["broadcast 8 B"][way] = partial(module.broadcast, small, last, group=group)
        found["barrier"][way] = partial(module.barrier, group=group)
        found["recv 8 B"][way] = bench.messages(partial(module.send, group=group), partial(module.recv, group=group), small)
        found["Work.wait 8 B"][way] = lambda: module.all_reduce(small, group=group, async_op=True).wait()

    add("API", mpicoll, None)
    add("torch", torch.distributed, None)
    add("Gloo", torch.distributed, gloo)
    return found


def ddp_step(process_group: Any) -> Call:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=process_group)
    data = torch.ones(8, 512)
    return lambda: model(data).sum().backward()


def figures(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:7.0f} {statistics.quantiles(seconds, n=10)[-1] * 1e6:7.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("milliseconds", nargs="*", type=float, default=[1, 5, 20, 100])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench()
    mpicoll.init_process_group()
    gloo = torch.distributed.new_group(backend="gloo")

    def say(line: str) -> None:
        if bench.rank == 0:
            print(line, flush=True)

    say(f"{bench.size} ranks, {mpi_name(MPI.Get_library_version())}; us after the late rank: median and 90 %")
    say(f"{'':>26}" + "".join(f"{way:>18}" for way in WAYS))
    for late_ms in args.milliseconds:
        for name, calls in operations(bench, gloo).items():
            times = {way: figures(bench.after(call, late_ms / 1e3, args.rounds)) for way, call in calls.items()}
            say(f"{late_ms:>5g} ms {name:>17}" + "".join(f"{times.get(way, ''):>18}" for way in WAYS))
    for way, group in (("torch", None), ("Gloo", gloo)):
        step = ddp_step(group)
        step()
        usual, late = (statistics.median(bench.after(step, late_s, args.rounds)) * 1e3 for late_s in (0.0, DDP_LATE_S))
        say(f"step of DDP, {way}: {late:.2f} ms after a rank that is 20 ms late, {usual:.2f} if none is late")
    for name, calls in operations(bench, gloo).items():
        used = {way: bench.cpu(calls[way]) for way in WAYS[1:] if way in calls}
        say(f"% of a core, rank 0 waits 5 s, {name}: " + ", ".join(f"{way} {value:.2f}" for way, value in used.items()))
    late_calls(bench, say, args)
    mpicoll.destroy_process_group()


def late_calls(bench: Bench, say: Callable[[str], None], args: Any) -> None:
    """rpc_sync of a function that sleeps: how long after its end the caller returns."""
    rpc.init_rpc(f"worker{bench.rank}", rank=bench.rank, world_size=bench.size)
    for late_ms in args.milliseconds:
        found = []
        for _ in range(args.rounds if bench.rank == 0 else 0):  # the others serve
            ended = rpc.rpc_sync(f"worker{bench.last}", returned_late, (late_ms / 1e3,))
            found.append(time.monotonic() - ended)
        if found:
            say(f"{late_ms:>5g} ms {'rpc_sync':>17}{'':18}{figures(found):>18}")
    rpc.shutdown()


if __name__ == "__main__":
    main()
