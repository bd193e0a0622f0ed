"""Workers as programs for torch.distributed.rpc start them, with mpicoll's imports. One argument:

rounds: this process spawns the workers, twice. children: under a launcher, each rank starts a process, which is its worker.
"""

import multiprocessing
import os
import sys

import torch
from torch import nn

import mpicoll
from mpicoll import autograd, optim, rpc

SIZE = 2


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def work(rank: int, size: int, word: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"  # as such programs do
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method="tcp://localhost:29501")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        parameter = rpc.remote("worker1", nn.Parameter, (torch.ones(2),))
        with autograd.context() as context:
            loss = rpc.rpc_sync("worker1", double, (parameter.to_here(),)).sum()
            autograd.backward(context, [loss])
            optim.DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.25).step(context)
        sys.stdout.write(f"{word}: {loss.item()}, then {parameter.to_here().tolist()}\n")
        sys.stdout.flush()
    rpc.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "rounds":
        for word in ("first", "second"):
            mpicoll.spawn(work, args=(SIZE, word), nprocs=SIZE)
    else:
        child = multiprocessing.get_context("spawn").Process(target=work, args=(int(os.environ["RANK"]), SIZE, "child"))
        child.start()
        child.join()
        sys.exit(child.exitcode)
