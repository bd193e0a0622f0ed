"""python -m mpicoll.run -n 2 -m mpicoll.bench [all_reduce | rpc] [--bytes 8 1024 ...] [--repeat N] [--width N]

all_reduce: what mpicoll adds to MPI's own; rpc: remote calls beside torch.distributed.rpc.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence

import torch

from mpicoll.bench import call_cost, remote_calls

SIZES = {"all_reduce": [8, 1024, 65536, 1 << 20], "rpc": [4096, 1 << 20, 64 << 20]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m mpicoll.bench", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=list(SIZES), default="all_reduce")
    parser.add_argument("--bytes", type=int, nargs="+", help="message sizes (multiples of 4)")
    parser.add_argument("--repeat", type=int, default=15, help="rounds; each measures every way once, in turn")
    parser.add_argument("--width", type=int, default=64, help="rpc: of the network; 64 is ResNet50, less is quicker")
    options = parser.parse_args(arguments)
    sizes = options.bytes or SIZES[options.what]
    if any(size < 4 or size % 4 for size in sizes):
        parser.error("--bytes: sizes are those of float32 tensors, multiples of 4")
    torch.set_num_threads(1)
    machine = f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__}"
    if options.what == "all_reduce":
        call_cost.measure(sizes, options.repeat, machine)
    else:
        remote_calls.measure(sizes, options.repeat, machine, options.width)


if __name__ == "__main__":
    main()
