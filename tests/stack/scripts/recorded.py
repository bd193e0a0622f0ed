"""A main function under torch's `record`: the last rank leaves in the way that the word says; the others wait for it.

recorded.py raises | exits
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    dist.init_process_group("mpi")
    if dist.get_rank() == dist.get_world_size() - 1:
        if sys.argv[1] == "exits":
            sys.exit(3)
        try:
            dist.send(torch.ones(1), dst=99)
        except ValueError as error:
            raise RuntimeError("nobody there") from error
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
