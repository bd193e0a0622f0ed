"""``mistakes.py MISTAKE``: a program with this mistake, after a good all_reduce. test_mistakes.py has the table."""

import ctypes
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch

import mpicoll as dist
from mpicoll import rpc

one = torch.ones(1)


def exception() -> None:
    if rank == 1:
        raise ValueError("batch 17 is empty")
    dist.all_reduce(one)


def exception_on_all_ranks() -> None:
    raise ValueError("no such data set")


def exception_in_a_thread() -> None:
    def load() -> None:
        raise ValueError("batch 17 is empty")

    if rank == 1:
        threading.Thread(target=load, name="loader").start()
    dist.recv(one, 1 - rank)


def exit_3() -> None:
    if rank == 1:
        sys.exit(3)
    dist.all_reduce(one)


def one_batch_fewer() -> None:
    for _ in range(2 - rank):
        dist.all_reduce(one)


def os_exit_0() -> None:
    if rank == 1:
        os._exit(0)
    dist.all_reduce(one)


def killed() -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(one)


def crash() -> None:
    if rank == 1:
        ctypes.string_at(0)
    dist.all_reduce(one)


def sizes() -> None:
    dist.all_reduce(torch.ones(2 + rank))


def large_sizes() -> None:
    dist.all_reduce(torch.ones((1 + rank) << 20))


def dtypes() -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))


def collectives() -> None:
    dist.all_reduce(one) if rank else dist.barrier()
    time.sleep(60)


def roots() -> None:
    dist.broadcast(torch.ones(4), src=rank)
    time.sleep(60)


def reductions() -> None:
    dist.all_reduce(one, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    time.sleep(60)


def late() -> None:
    if rank == 1:
        time.sleep(60)
    dist.all_reduce(one)


def both_receive() -> None:
    dist.recv(one, 1 - rank)


def no_such_rank() -> None:
    dist.send(one, dst=2)


def no_answer() -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)


def too_long() -> None:
    if rank == 0:
        dist.send(torch.ones(5), dst=1)
        time.sleep(60)
    dist.recv(torch.ones(4), src=0)


def refused() -> None:
    dist.all_gather([torch.ones(1)] * (2 - rank), one)


def group_of_some() -> None:
    if rank == 0:
        dist.new_group([0, 1], timeout=timedelta(seconds=3))
    time.sleep(60)


def no_init() -> None:
    dist.destroy_process_group()
    dist.all_reduce(one)


def rpc_to_nobody() -> None:
    rpc.init_rpc(f"worker{rank}")
    rpc.rpc_sync("worker7", torch.ones, (1,))


def nccl() -> None:
    dist.destroy_process_group()
    dist.init_process_group("nccl")
    dist.all_reduce(one)


dist.init_process_group(timeout=timedelta(seconds=4))
rank = dist.get_rank()
dist.all_reduce(one)
globals()[sys.argv[1]]()
