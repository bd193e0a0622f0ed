# python examples/basics/spawn.py
"""Starts ranks from Python, without a launcher on the command line.

`spawn` calls the function in every rank, with the rank's number and then the arguments, and returns a list of what the ranks
return. The ranks import this file again, so that only the `if` at its end may start them.
"""

import torch

import mpicoll as dist


def work(rank: int, value: int) -> int:
    dist.init_process_group()
    total = torch.tensor([value])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total.item()) + rank


if __name__ == "__main__":
    print("results:", dist.spawn(work, args=(5,), nprocs=2))
