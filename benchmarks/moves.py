"""All ways to move memory between two ranks, each beside the same way of MPI alone: milliseconds of raw MPI, and ratios to it.

    python -m mpicoll.run -n 2 -m benchmarks.moves            MEBIBYTES...; default: 1 16 64 256

Medians of the rounds in which the ways alternate. batch: isend and irecv both ways. rpc_sync: there and back, raw MPI likewise.
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
from torch import Tensor

import mpicoll
from benchmarks.session import mpi_name
from mpicoll import rpc

ROUNDS = 9
WAYS = ("API", "torch", "Gloo")
Call = Callable[[], object]


def given_back(tensor: Tensor) -> Tensor:
    """Runs on the other rank."""
    return tensor


class Moves:
    """The ways to move ``nbytes`` between ranks 0 and 1."""

    def __init__(self, nbytes: int, gloo: Any) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.peer = self.comm.rank, 1 - self.comm.rank
        self.nbytes, self.gloo = nbytes, gloo
        self.sent, self.received = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        self.half = nbytes // 8
        self.list = [torch.zeros(self.half) for _ in range(2)]
        self.out, self.into = [self.sent.numpy(), MPI.FLOAT], [self.received.numpy(), MPI.FLOAT]

    def one_way(self, send: Call, receive: Call) -> Call:
        return send if self.rank == 0 else receive

    def raw(self) -> dict[str, Call]:
        comm, out, into, half = self.comm, self.out, self.into, self.half
        part, whole = [self.sent.numpy()[:half], MPI.FLOAT], [self.received.numpy(), MPI.FLOAT]
        there = self.one_way(partial(comm.Send, out, 1), partial(comm.Recv, into, 0))
        back = self.one_way(partial(comm.Recv, into, 1), partial(comm.Send, out, 0))
        started = self.one_way(lambda: comm.Isend(out, 1).Wait(), lambda: comm.Irecv(into, 0).Wait())
        return {
            "send, recv": there,
            "isend, irecv": started,
            "batch both ways": lambda: MPI.Request.Waitall([comm.Isend(out, self.peer), comm.Irecv(into, self.peer)]),
            "gather": partial(comm.Gather, part, whole if self.rank == 0 else None),
            "scatter": partial(comm.Scatter, whole if self.rank == 0 else None, part),
            "reduce": self.one_way(partial(comm.Reduce, MPI.IN_PLACE, out), partial(comm.Reduce, out, None)),
            "async all_reduce": lambda: comm.Iallreduce(MPI.IN_PLACE, out).Wait(),
            "send_object_list": there,
            "rpc_sync": lambda: (there(), back()),
        }

    def through(self, dist: Any, group: Any) -> dict[str, Call]:
        sent, received, own, peer = self.sent, self.received, self.received[: self.half], self.peer
        parts = self.list if self.rank == 0 else None

        def batch() -> None:
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, received, peer, group)]
            ):
                work.wait()

        return {
            "send, recv": self.one_way(partial(dist.send, sent, 1, group), partial(dist.recv, received, 0, group)),
            "isend, irecv": self.one_way(
                lambda: dist.isend(sent, 1, group).wait(), lambda: dist.irecv(received, 0, group).wait()
            ),
            "batch both ways": batch,
            "gather": lambda: dist.gather(sent[: self.half], parts, 0, group=group),
            "scatter": lambda: dist.scatter(own, parts, 0, group=group),
            "reduce": lambda: dist.reduce(sent, 0, group=group),
            "async all_reduce": lambda: dist.all_reduce(sent, group=group, async_op=True).wait(),
            "send_object_list": self.one_way(
                lambda: dist.send_object_list([sent], 1, group=group), lambda: dist.recv_object_list([None], 0, group=group)
            ),
        }

    def called(self) -> dict[str, Call]:
        """rpc_sync by rank 0; the other rank serves."""
        return {"rpc_sync": self.one_way(lambda: rpc.rpc_sync("worker1", given_back, (self.sent,)), lambda: None)}

    def table(self, rounds: int, names: list[str]) -> list[str]:
        """Times all ways (collective)."""
        ways = {"MPI": self.raw(), "API": {**self.through(mpicoll, None), **self.called()}}
        ways |= {"torch": self.through(torch.distributed, None), "Gloo": self.through(torch.distributed, self.gloo)}
        lines = []
        for name in names or list(ways["MPI"]):
            times: dict[str, list[float]] = {way: [] for way in ways if name in ways[way]}
            for number in range(rounds + 1):
                for way in times:
                    self.sent.fill_(1.0)
                    mpicoll.barrier()  # not that of MPI, in which a rank that serves calls would keep a core busy
                    began = time.perf_counter()
                    ways[way][name]()
                    slowest = torch.tensor(time.perf_counter() - began)
                    mpicoll.all_reduce(slowest, mpicoll.ReduceOp.MAX)
                    if number:  # the first one touches memory
                        times[way].append(slowest.item())
            medians = {way: statistics.median(seconds) for way, seconds in times.items()}
            ratios = "".join(f"{medians[way] / medians['MPI']:>8.2f}" if way in medians else f"{'':>8}" for way in WAYS)
            lines.append(f"{self.nbytes >> 20:>5} MiB {name:>18}{medians['MPI'] * 1e3:>10.2f}{ratios}")
        return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mebibytes", nargs="*", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", action="append", default=[], metavar="WAY")
    args = parser.parse_args()
    torch.set_num_threads(1)
    mpicoll.init_process_group()
    gloo = torch.distributed.new_group(backend="gloo")
    rank = mpicoll.get_rank()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        print(f"{mpi_name(MPI.Get_library_version())}{'MPI, ms':>22}" + "".join(f"{way:>8}" for way in WAYS), flush=True)
    for mebibytes in args.mebibytes:
        for line in Moves(mebibytes << 20, gloo).table(args.rounds, args.only):
            if rank == 0:
                print(line, flush=True)
    rpc.shutdown()
    mpicoll.destroy_process_group()


if __name__ == "__main__":
    main()
