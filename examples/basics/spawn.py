# python examples/basics/spawn.py
"""Starts ranks from Python, without a launcher on the command line.

`spawn` calls the function in every rank, with the rank's number and then the arguments. The ranks import this file again, so that
only the `if` at its end may start them.
"""

import torch

import mpicoll as dist


def work(rank: int, value: int) -> None:
    dist.init_process_group()
    total = torch.tensor([value])
    dist.all_reduce(total)
    print(f"rank {rank}: sum {total.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.spawn(work, args=(5,), nprocs=2)
