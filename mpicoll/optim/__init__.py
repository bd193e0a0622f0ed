"""torch.distributed.optim, with a DistributedOptimizer for mpicoll.rpc's RRefs; everything else is torch's own."""

from __future__ import annotations

from typing import Any

from mpicoll.optim.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]


def __getattr__(name: str) -> Any:
    import torch.distributed.optim

    return getattr(torch.distributed.optim, name)
