"""A function of the main program that torch.jit has compiled, called on the other rank."""

from __future__ import annotations

import os
import warnings

import torch

from mpicoll import rpc

warnings.simplefilter("ignore")


@torch.jit.script
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


if __name__ == "__main__":
    rpc.init_rpc(f"worker{os.environ['RANK']}")
    print("answer:", rpc.rpc_sync(1 - int(os.environ["RANK"]), twice, (torch.ones(1),)).item(), flush=True)
    rpc.shutdown()
