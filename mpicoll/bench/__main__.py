"""python -m mpicoll.run -n 2 -m mpicoll.bench [--bytes 8 1024 ...] [--repeat N]: what mpicoll adds to an all_reduce."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence

import torch

from mpicoll.bench import call_cost


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mpicoll.bench", description=__doc__)
    parser.add_argument("--bytes", type=int, nargs="+", default=[8, 1024, 65536, 1 << 20], help="message sizes (multiples of 4)")
    parser.add_argument("--repeat", type=int, default=15, help="rounds; each measures every way once, in turn")
    options = parser.parse_args(arguments)
    if any(size < 4 or size % 4 for size in options.bytes):
        parser.error("--bytes: sizes are those of float32 tensors, multiples of 4")
    torch.set_num_threads(1)
    machine = f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__}"
    call_cost.measure(options.bytes, options.repeat, machine)


if __name__ == "__main__":
    main()
