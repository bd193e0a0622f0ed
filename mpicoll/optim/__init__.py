"""torch.distributed.optim, with a DistributedOptimizer for RRefs of mpicoll.rpc. All other names are torch's own objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpicoll.optim.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer", "PostLocalSGDOptimizer", "ZeroRedundancyOptimizer", "as_functional_optim"]

if TYPE_CHECKING:
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, as_functional_optim
else:  # with this function, a name that is not there would be of type Any to a type checker

    def __getattr__(name: str) -> Any:
        if name == "optimizer":
            raise AttributeError("module 'mpicoll.optim' has no attribute 'optimizer': torch's is for its own RPC")
        import torch.distributed.optim

        return getattr(torch.distributed.optim, name)
